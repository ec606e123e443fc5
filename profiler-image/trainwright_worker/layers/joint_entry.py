"""Megatron-LM's f for several activations at once: one all-reduce sums all of their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright_worker.layers import sequence_parallel
from trainwright_worker.layers.collectives import Collectives
from trainwright_worker.layers.tensor_parallel import TensorShard


def enter_together(shard: TensorShard, *activations: Tensor) -> tuple[Tensor, ...]:
    """The same activations, of one number format, for every rank; backward, one all-reduce sums their gradients."""
    if shard.degree == 1 or shard.collectives is None:
        return activations
    if shard.sequence_parallel:
        return sequence_parallel.enter(shard.collectives, *activations)
    return _entered(shard.collectives, activations)


class _EnterTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, *activations: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(activation.view_as(activation) for activation in activations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        joint = torch.cat([gradient.flatten() for gradient in gradients])
        ctx.group.all_reduce(joint)
        parts = torch.split(joint, [gradient.numel() for gradient in gradients])
        return None, *(part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))


def _entered(group: Collectives, activations: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return _EnterTogether.apply(group, *activations)  # type: ignore[no-any-return, no-untyped-call]
