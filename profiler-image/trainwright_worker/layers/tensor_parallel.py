"""Tensor parallelism by hand: the two points of a layer where a tensor group meets (Megatron-LM's f and g)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainwright_worker.layers.layer import Layer

AllReduce = Callable[[Tensor], None]
"""Sums a tensor over the tensor group, in place."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's part of the tensor-parallel layers: the `index`-th of `degree` equal parts.

    Attributes:
        all_reduce: None where a part is computed by itself, without its group (profiling).
    """

    index: int = 0
    degree: int = 1
    all_reduce: AllReduce | None = None

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
        if self.degree == 1 or self.all_reduce is None:
            return activation
        return _entered(activation, self.all_reduce)

    def leave(self, partial: Tensor) -> Tensor:
        """g: sums the ranks' partial results; in the backward the gradient goes to every rank as it is."""
        if self.degree == 1 or self.all_reduce is None:
            return partial
        return _left(partial, self.all_reduce)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, all_reduce: AllReduce) -> Tensor:
        ctx.all_reduce = all_reduce
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        ctx.all_reduce(gradient)
        return gradient, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, all_reduce: AllReduce) -> Tensor:
        all_reduce(partial)
        ctx.mark_dirty(partial)  # summed in place: a matrix product does not keep its result for the backward
        return partial

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _entered(activation: Tensor, all_reduce: AllReduce) -> Tensor:
    return _Enter.apply(activation, all_reduce)  # type: ignore[no-any-return, no-untyped-call]


def _left(partial: Tensor, all_reduce: AllReduce) -> Tensor:
    return _Leave.apply(partial, all_reduce)  # type: ignore[no-any-return, no-untyped-call]
