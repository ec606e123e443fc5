"""Operators of transformers on this rank's parts of their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainwright_worker.layers.attention import causal_attention
from trainwright_worker.layers.tensor_parallel import Collectives
from trainwright_worker.layers.transformer_parts import by_head, join_heads


def attend_causally(  # noqa: PLR0913, PLR0917 - operands and what they are
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: tuple[int, int],
    first: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention of some positions over all before them, (rows, queries, heads × size).

    Args:
        queries: (rows, queries, heads × size).
        keys: (rows, positions, groups × size), from position 0 on.
        values: likewise.
        heads: heads of the queries, and of keys and values.
        first: position of the first query.
        window: positions that a query attends to, its own included; None: all before.
        scale: of the scores; None: 1 / √size.
    """
    count, positions = queries.shape[1], keys.shape[1]
    query, key, value = by_head(queries, heads[0]), by_head(keys, heads[1]), by_head(values, heads[1])
    if count == positions:
        return join_heads(causal_attention(query, key, value, window, scale))
    # `is_causal` aligns fewer queries than keys at the first key, so the mask states the positions.
    visible = torch.ones(count, positions, dtype=torch.bool, device=query.device).tril(first)
    if window is not None:
        visible = visible.triu(first + 1 - window)
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scale, enable_gqa=heads[0] != heads[1]
    )
    return join_heads(mixed)


def divided_norm(values: Tensor, weight: Tensor, bias: Tensor | None, group: Collectives, epsilon: float) -> Tensor:
    """Normalise values (…, width / ranks), whose width the ranks of a group divide equally.

    With a bias the mean is subtracted (LayerNorm); without one values are divided by their root mean square. Weight and bias
    are this rank's parts, (width / ranks,).
    """
    normed: Tensor = _DividedNorm.apply(values, weight, bias, group, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _DividedNorm(torch.autograd.Function):
    """Norm whose ranks gather the moments of their parts, and sum two products of the gradient in the backward."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - as autograd calls it
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, group: Collectives, epsilon: float
    ) -> Tensor:
        is_centred = bias is not None
        wide, width = values.float(), values.shape[-1] * group.size
        mean = wide.mean(-1, keepdim=True) if is_centred else wide.new_zeros(*wide.shape[:-1], 1)
        moments = torch.stack((mean, (wide - mean).square().sum(-1, keepdim=True)))
        means, squares = group.all_gather(moments.flatten()).view(group.size, *moments.shape).unbind(1)
        whole_mean = means.mean(0)
        # Chan, Golub and LeVeque 1979: squares around the parts' means, and of these means around the whole one.
        total = squares.sum(0) + values.shape[-1] * (means - whole_mean).square().sum(0)
        scale = (total / width + epsilon).rsqrt()
        ctx.save_for_backward(values, weight, whole_mean, scale)
        ctx.group, ctx.is_centred = group, is_centred
        normed = (wide - whole_mean) * scale * weight.float()
        return (normed if bias is None else normed + bias.float()).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, scale = ctx.saved_tensors
        width, wide = values.shape[-1] * ctx.group.size, gradient.float()
        normed = (values.float() - mean) * scale
        of_normed = wide * weight.float()
        sums = torch.stack((of_normed.sum(-1, keepdim=True), (of_normed * normed).sum(-1, keepdim=True)))
        ctx.group.all_reduce(sums)
        of_mean, of_scale = sums / width
        of_values = scale * (of_normed - normed * of_scale - (of_mean if ctx.is_centred else 0.0))
        of_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        of_bias = wide.flatten(0, -2).sum(0).to(weight.dtype) if ctx.is_centred else None
        return of_values.to(values.dtype), of_weight, of_bias, None, None
