"""Gradients in one flat buffer each: summed over the data replicas, and for a shared weight over all its owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientBuffer:
    """One buffer that holds the gradients of several parameters, which see it as their `grad`.

    Micro-batches add to it, one all-reduce sums it. Each replica's loss is a sum over its own rows divided by the
    tokens of the global batch, so replicas with unequal rows need nothing but the plain sum.

    Attributes:
        contributes: whether this rank's part counts; owners that hold the same gradient as another one give zeros.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, contributes: bool = True
    ) -> None:
        self._group = group
        self._contributes = contributes
        first = parameters[0]
        total = sum(parameter.numel() for parameter in parameters)
        self.values = torch.zeros(total, dtype=first.dtype, device=first.device)
        start = 0
        for parameter in parameters:
            parameter.grad = self._view(start, parameter)
            start += parameter.numel()
        self._parameters = list(parameters)

    def _view(self, start: int, parameter: nn.Parameter) -> Tensor:
        return self.values[start : start + parameter.numel()].view_as(parameter)

    def clear(self) -> None:
        self.values.zero_()

    def reduce(self) -> None:
        """Sum over the group; afterwards every member holds the gradient of the whole batch."""
        if self._group is None:
            return
        if not self._contributes:
            self.values.zero_()
        dist.all_reduce(self.values, group=self._group)
