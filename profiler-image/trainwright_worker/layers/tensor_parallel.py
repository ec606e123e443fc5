"""Tensor parallelism by hand: the two points of a layer where a tensor group meets (Megatron-LM's f and g)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright_worker.layers import sequence_parallel
from trainwright_worker.layers.collectives import Collectives

if TYPE_CHECKING:
    from trainwright_worker.layers.layer import Layer


BLOCK_SPLIT: Mapping[str, int] = {
    "qkv_weight": 1,
    "qkv_bias": 1,
    "attention_weight": 1,
    "expand_weight": 0,
    "expand_bias": 0,
    "contract_weight": 1,
}
"""By weight of attention and feed-forward with GELU: the dimension that Megatron-LM's split divides."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's part of the tensor-parallel layers: the `index`-th of `degree` equal parts.

    Attributes:
        collectives: None where a part is computed by itself, without its group (profiling).
        sequence_parallel: whether, outside of `enter` … `leave`, a rank has only its part of the sequence.
    """

    index: int = 0
    degree: int = 1
    collectives: Collectives | None = None
    sequence_parallel: bool = False

    def take(self, whole: Tensor, dimension: int) -> Tensor:
        """This rank's part of a whole weight."""
        return whole.chunk(self.degree, dimension)[self.index].clone()

    def register(self, layer: Layer, whole: Mapping[str, Tensor]) -> None:
        """Give the layer this rank's part of these whole weights, divided as its `split_dimensions` say."""
        for name, weight in whole.items():
            dimension = layer.split_dimensions.get(name)
            part = weight if dimension is None else self.take(weight, dimension)
            layer.register_parameter(name, nn.Parameter(part))

    def enter(self, activation: Tensor) -> Tensor:
        """f: hands the same activation to every rank; in the backward the ranks' gradients are summed."""
        if self.degree == 1 or self.collectives is None:
            return activation
        if self.sequence_parallel:
            return sequence_parallel.enter(self.collectives, activation)[0]
        return _entered(activation, self.collectives)

    def leave(self, partial: Tensor) -> Tensor:
        """g: sums the ranks' partial results; in the backward the gradient goes to every rank as it is."""
        if self.degree == 1 or self.collectives is None:
            return partial
        if self.sequence_parallel:
            return sequence_parallel.leave(self.collectives, partial)
        return _left(partial, self.collectives)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        ctx.group.all_reduce(gradient)
        return gradient, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Collectives) -> Tensor:
        group.all_reduce(partial)
        ctx.mark_dirty(partial)  # summed in place: a matrix product does not keep its result for the backward
        return partial

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _entered(activation: Tensor, group: Collectives) -> Tensor:
    return _Enter.apply(activation, group)  # type: ignore[no-any-return, no-untyped-call]


def _left(partial: Tensor, group: Collectives) -> Tensor:
    return _Leave.apply(partial, group)  # type: ignore[no-any-return, no-untyped-call]
