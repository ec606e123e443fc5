"""The size of gradients: its norm over all devices, clipping to a limit, and the scaling that float16 needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright_worker.executor.optimizer import summed
from trainwright_worker.executor.unit import Unit


@dataclass(frozen=True)
class Counted:
    """A unit, and which of its values this rank counts, so that over all ranks each value counts once.

    Attributes:
        split: whether it counts those that a tensor degree divides.
        whole: and the others, which every rank of a tensor group holds.
    """

    unit: Unit
    split: bool
    whole: bool

    def square_sum(self) -> Tensor:
        """Of this rank's part of the summed gradient, shape ()."""
        gradient = summed(self.unit)
        edge = min(max(self.unit.split_size - self.unit.low, 0), len(gradient))
        total = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for counts, values in ((self.split, gradient[:edge]), (self.whole, gradient[edge:])):
            if counts:
                total += values.double().square().sum()
        return total


class LossScale:
    """Multiplies float16's loss so that small gradients do not vanish; halves when they overflow, doubles in quiet.

    The same on every rank, since all of them see the same norm.

    Attributes:
        quiet_iterations: those since the factor last changed.
    """

    FIRST = 2.0**16
    QUIET_ITERATIONS = 2000

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.factor = self.FIRST if active else 1.0
        self.quiet_iterations = 0

    def resume(self, factor: float | None, quiet_iterations: int) -> None:
        """Go on from where an earlier run's scale stood; None where that run scaled nothing."""
        if self.active and factor is not None:
            self.factor, self.quiet_iterations = factor, quiet_iterations

    def update(self, *, overflowed: bool) -> None:
        """After an iteration."""
        if not self.active:
            return
        self.quiet_iterations = 0 if overflowed else self.quiet_iterations + 1
        if overflowed:
            self.factor = max(1.0, self.factor / 2)
        elif self.quiet_iterations == self.QUIET_ITERATIONS:
            self.factor, self.quiet_iterations = self.factor * 2, 0


class GradientNorm:
    """The norm of all summed gradients over all ranks of a plan."""

    def __init__(self, counted: Sequence[Counted], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._counted, self._group, self._device = counted, group, device

    def of_all(self) -> float:
        """As the gradients stand, scaled or not; infinite or not a number where one of them is."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for one in self._counted:
            total += one.square_sum()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return float(total.sqrt())

    def shrink(self, factor: float) -> None:
        """Multiply every gradient."""
        for one in self._counted:
            summed(one.unit).mul_(factor)
