"""RMSNorms of queries and keys over their whole widths, which a tensor group divides by heads (OLMo 2, arXiv 2501.00656 §3.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright_worker.layers.tensor_parallel import Collectives, TensorShard


def rms_norms_over_group(
    shard: TensorShard, query: Tensor, key: Tensor, weights: tuple[Tensor, Tensor], epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, each normalised over the widths of all ranks.

    The ranks gather both sums of squares of each position, and in the backward both of their gradients' sums.

    Args:
        shard: this rank's part.
        query: its heads, (rows, positions, width).
        key: likewise.
        weights: of queries and keys, (width,) each.
        epsilon: of both norms.
    """
    return _NormsOverGroup.apply(  # type: ignore[no-any-return, no-untyped-call]
        query, key, *weights, epsilon, shard.degree, shard.collectives
    )


class _NormsOverGroup(torch.autograd.Function):
    """Both norms: y = x · r · w with r = (mean x² + ε)^−½. It saves x, and r in float32."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 (autograd takes no keywords)
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        epsilon: float,
        degree: int,
        group: Collectives | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.widths, ctx.group = (degree * query.shape[-1], degree * key.shape[-1]), group
        squares = _summed([values.float().square().sum(-1) for values in (query, key)], group)
        inverse = torch.stack(
            [(total / width + epsilon).rsqrt() for total, width in zip(squares, ctx.widths, strict=True)]
        )
        ctx.save_for_backward(query, key, query_weight, key_weight, inverse)
        normed = (
            (values.float() * deviation.unsqueeze(-1) * weight).to(values.dtype)
            for values, weight, deviation in zip((query, key), (query_weight, key_weight), inverse, strict=True)
        )
        return tuple(normed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *values, query_weight, key_weight, inverse = ctx.saved_tensors
        weights = query_weight, key_weight
        scaled = [part.float() * deviation.unsqueeze(-1) for part, deviation in zip(values, inverse, strict=True)]
        of_scaled = [gradient.float() * weight for gradient, weight in zip(gradients, weights, strict=True)]
        products = [(gradient * part).sum(-1) for gradient, part in zip(of_scaled, scaled, strict=True)]
        means = [total / width for total, width in zip(_summed(products, ctx.group), ctx.widths, strict=True)]
        of_values = [
            ((gradient - part * mean.unsqueeze(-1)) * deviation.unsqueeze(-1)).to(whole.dtype)
            for gradient, part, mean, deviation, whole in zip(of_scaled, scaled, means, inverse, values, strict=True)
        ]
        of_weights = [
            (gradient.float() * part).flatten(0, -2).sum(0).to(weight.dtype)
            for gradient, part, weight in zip(gradients, scaled, weights, strict=True)
        ]
        return *of_values, *of_weights, None, None, None


def _summed(statistics: list[Tensor], group: Collectives | None) -> Tensor:
    """Return the sums over a tensor group of both statistics, (2, rows, positions); a part without its group has its own."""
    own = torch.stack(statistics)
    return own if group is None else group.all_gather(own.flatten()).sum(0).view_as(own)
