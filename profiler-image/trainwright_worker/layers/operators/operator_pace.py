"""Emulated seconds of operators, stated while they are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OperatorPace:
    """Emulated seconds of a layer's operators in the forward; the backward takes twice as long.

    Attributes:
        add: adds seconds to the computation until the next message.
    """

    seconds: Mapping[str, float]
    add: Callable[[float], None]

    def state(self, name: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """State the seconds of an operator that has computed these tensors, now and when its backward begins."""
        seconds = self.seconds[name]
        self.add(seconds)
        return _StateBackward.apply(self.add, 2 * seconds, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _StateBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, add: Callable[[float], None], seconds: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.add, ctx.seconds = add, seconds
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.add(ctx.seconds)
        return None, None, *gradients
