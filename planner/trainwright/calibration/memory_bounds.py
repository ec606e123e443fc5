"""Bounds of predicted memory by what trials show: a plan that ran fits, one that ran out of memory does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Final

import numpy as np

from trainwright.calibration.factors import Evaluation, MemoryFactors
from trainwright.calibration.robust_least_squares import Vector
from trainwright.cost.context import CostContext
from trainwright.runtime import Runtime
from trainwright.search import Limits, assuming_process_memory, is_assumed

UNEXPLAINED_SHARE: Final = 0.88
"""Share of its memory below which a device that ran out of it is unexplained: fragments alone seldom take the rest."""
_BISECTIONS: Final = 20


@dataclass(frozen=True)
class MemoryBounds:
    """Bounds of the memory that trials fill: from above of those that ran, from below of those that ran out of it.

    Attributes:
        ran, overfull: numbers of trials.
        observations: numbers of trials whose peaks are fitted, in order.
    """

    evaluation: Evaluation
    factors: MemoryFactors
    ran: tuple[int, ...]
    overfull: tuple[int, ...]
    observations: tuple[int, ...] = ()

    @property
    def owners(self) -> tuple[int, ...]:
        """Observation of each bound's trial; -1 for trials without a measured peak."""
        places = {trial: place for place, trial in enumerate(self.observations)}
        return (*(places.get(trial, -1) for trial in self.ran), *(-1 for _ in self.overfull))

    def excess(self, values: Vector) -> Vector:
        """Return the logarithm of predicted over bounding share for each bound that is not kept, 0 for the others."""
        runtime = self._runtime(values)
        allowed = self._allowed_share(runtime)
        above = [max(log(self.evaluation.filled_share(trial, runtime) / allowed), 0.0) for trial in self.ran]
        below = [min(log(self.evaluation.filled_share(trial, runtime)), 0.0) for trial in self.overfull]
        return np.array([*above, *below], dtype=np.float64)

    def lowered(self, values: Vector, left_out: int | None = None) -> Vector:
        """Return values at which every trial that ran fits; the constant is lowered first, then all factors.

        Without the trial of the observation `left_out`, and those that fit at no values.
        """
        trial_left_out = None if left_out is None else self.observations[left_out]
        ran = [trial for trial in self._able_to_fit if trial != trial_left_out]
        for _ in range(2):  # with little constant memory plans leave a share free, which takes a second step
            if self._lacking_bytes(ran, values) <= 0:
                return values
            runtime = self._runtime(values)
            left = max(runtime.constant_bytes - self._lacking_bytes(ran, values) - 1, 0.0)
            values = self.factors.with_constant(values, left)
        least = np.minimum(self._least, values)
        kept, lost = 0.0, 1.0
        if self._lacking_bytes(ran, values) <= 0:
            return values
        for _ in range(_BISECTIONS):
            middle = (kept + lost) / 2
            fits = self._lacking_bytes(ran, least + middle * (values - least)) <= 0
            kept, lost = (middle, lost) if fits else (kept, middle)
        return np.asarray(least + kept * (values - least), dtype=np.float64)

    def unexplained(self, values: Vector) -> tuple[int, ...]:
        """Return the trials that ran out of memory of which the values predict that they leave some of it free."""
        runtime = self._runtime(values)
        return tuple(
            trial for trial in self.overfull if self.evaluation.filled_share(trial, runtime) < UNEXPLAINED_SHARE
        )

    def without(self, overfull: Sequence[int]) -> MemoryBounds:
        """Return the bounds without those of trials that ran out of memory."""
        return replace(self, overfull=tuple(trial for trial in self.overfull if trial not in overfull))

    @property
    def _least(self) -> Vector:
        return np.array([parameter.low for parameter in self.factors.parameters])

    @cached_property
    def _able_to_fit(self) -> list[int]:
        """Trials that ran and fit at the lowest values."""
        return [trial for trial in self.ran if self._lacking_bytes([trial], self._least) <= 0]

    def _lacking_bytes(self, trials: Sequence[int], values: Vector) -> float:
        """Return the bytes that the fullest device of the trials lacks of what plans may take there; at most 0 if all fit."""
        runtime, limits = self._runtime(values), self.evaluation.context.memory_of_node
        allowed = self._allowed_share(runtime)
        return max(
            (
                size - allowed * limits[device.node]
                for trial in trials
                for device, size in self.evaluation.memory(trial, runtime).items()
            ),
            default=0.0,
        )

    def _allowed_share(self, runtime: Runtime) -> float:
        """Return the share of a device's memory that plans for a runtime may take where no head-room is stated."""
        return 1 - Limits().leaving_unknown_memory(runtime, self.evaluation.context.cluster).headroom

    def _runtime(self, values: Vector) -> Runtime:
        return self.factors.apply(values, self.factors.runtime)


def with_assumption_as_constant(context: CostContext) -> Runtime:
    """Return the runtime whose constant includes what plans assume of a process, which trials may lower.

    Plans assume it of GPUs with estimated layers. The processes are stated to hold nothing else, so that none is assumed again,
    but for what is assumed of one card beyond another.
    """
    runtime = assuming_process_memory(context.runtime, context.cluster, context.profiles.origin)
    assumed = {entry.accelerator: entry.held_bytes for entry in runtime.process_bytes if is_assumed(entry)}
    if not assumed:
        return runtime
    least = min(assumed.values())
    processes = (
        replace(entry, held_bytes=entry.held_bytes - least) if entry.accelerator in assumed else entry
        for entry in runtime.process_bytes
    )
    return replace(runtime, constant_bytes=runtime.constant_bytes + least, process_bytes=tuple(processes))


def refuses(context: CostContext, evaluation: Evaluation, trials: Sequence[int]) -> bool:
    """Return whether plans for the context's runtime refuse one of the trials, with all that they assume."""
    runtime = assuming_process_memory(context.runtime, context.cluster, context.profiles.origin)
    limits = Limits().leaving_unknown_memory(runtime, context.cluster)
    return any(evaluation.filled_share(trial, runtime) > 1 - limits.headroom for trial in trials)
