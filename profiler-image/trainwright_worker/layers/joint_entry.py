"""Megatron-LM's f for several activations at once: one all-reduce sums all of their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright_worker.layers.tensor_parallel import AllReduce, TensorShard


def enter_together(shard: TensorShard, *activations: Tensor) -> tuple[Tensor, ...]:
    """The same activations, of one number format, for every rank; backward, one all-reduce sums their gradients."""
    if shard.degree == 1 or shard.all_reduce is None:
        return activations
    return _entered(shard.all_reduce, activations)


class _EnterTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, all_reduce: AllReduce, *activations: Tensor) -> tuple[Tensor, ...]:
        ctx.all_reduce = all_reduce
        return tuple(activation.view_as(activation) for activation in activations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        joint = torch.cat([gradient.flatten() for gradient in gradients])
        ctx.all_reduce(joint)
        parts = torch.split(joint, [gradient.numel() for gradient in gradients])
        return None, *(part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))


def _entered(all_reduce: AllReduce, activations: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return _EnterTogether.apply(all_reduce, *activations)  # type: ignore[no-any-return, no-untyped-call]
