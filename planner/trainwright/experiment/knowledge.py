"""What is known of the plans that may be tried: beliefs of their seconds and memory, and what trials have said."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from trainwright.experiment.belief import Belief, Vector, below
from trainwright.experiment.doubts import Doubts
from trainwright.experiment.envelope import expected_drop

_DRAWS: Final = 4096
_SEED: Final = 0
"""Regret is an average over the same draws every time: answers do not change from one call to the next."""
_LIKELY: Final = 0.5


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Plans by number, what is believed of them, and what came of those that were tried.

    Attributes:
        seconds: belief of iteration seconds.
        memory: belief of the share of its memory that the fullest device takes; above 1 the plan does not run.
        noise: standard deviation of the logarithm of measured seconds around the truth.
        measured: by plan: seconds.
        failed: plans that do not run.
    """

    seconds: Belief
    memory: Belief
    noise: float
    measured: Mapping[int, float] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()

    @classmethod
    def before_trials(
        cls,
        predicted_seconds: Sequence[float],
        covariance: Sequence[Sequence[float]] | Vector,
        memory_shares: Sequence[float],
        doubts: Doubts | None = None,
    ) -> Knowledge:
        """What predictions alone let one believe; the covariance is that of the logarithms of the seconds."""
        doubts = doubts or Doubts()
        own = doubts.own_memory**2 * np.eye(len(memory_shares))
        return cls(
            Belief(np.log(predicted_seconds), np.array(covariance, dtype=np.float64)),
            Belief(np.log(memory_shares), doubts.memory**2 + own),
            doubts.noise,
        )

    def after_seconds(self, plan: int, seconds: float, *, memory_share: float | None = None) -> Knowledge:
        """After a trial that ran; `memory_share` of the fullest device, where it was measured."""
        if memory_share is None:
            memory = self.memory.bounded(plan, above=False)
        else:
            memory = self.memory.observed(plan, memory_share, noise=0.0)
        believed = self.seconds.observed(plan, seconds, noise=self.noise)
        measured, failed = {**self.measured, plan: seconds}, self.failed - {plan}
        return replace(self, seconds=believed, memory=memory, measured=measured, failed=failed)

    def after_failure(self, plan: int, *, out_of_memory: bool) -> Knowledge:
        """After a trial that did not run. Out of memory: the others are likelier to be, too."""
        memory = self.memory.bounded(plan, above=True) if out_of_memory else self.memory
        return replace(self, memory=memory, failed=self.failed | {plan})

    @property
    def untried(self) -> list[int]:
        """Plans that may be tried."""
        return [
            plan for plan in range(len(self.seconds.means)) if plan not in self.measured and plan not in self.failed
        ]

    @cached_property
    def fits(self) -> Vector:
        """[n]: how likely each plan fits into memory."""
        spread = zip(self.memory.means.tolist(), self.memory.deviations.tolist(), strict=True)
        found = [below(-mean / deviation) if deviation else float(mean <= 0) for mean, deviation in spread]
        found = [1.0 if plan in self.measured else 0.0 if plan in self.failed else p for plan, p in enumerate(found)]
        return np.array(found, dtype=np.float64)

    @property
    def best(self) -> int | None:
        """The plan to train with if there were no further trial: of those that ran, the one believed fastest.

        Before any ran, the first to try. None where all failed.
        """
        if self.measured:
            return self._fastest(self.measured)
        return self.first_of(self.untried)

    def first_of(self, plans: Collection[int]) -> int | None:
        """The one believed fastest of those that likely fit, or the likeliest to fit; None of none."""
        likely = [plan for plan in plans if self.fits[plan] >= _LIKELY]
        return self._fastest(likely) if likely else max(plans, key=lambda plan: float(self.fits[plan]), default=None)

    def gain(self, plan: int) -> float:
        """By how much a trial of an untried plan is expected to lower the logarithm of the best plan's seconds.

        What can be chosen behind it is that plan, if it fits, or any that ran before: of all of them the measurement
        tells something (the knowledge gradient of Frazier, Powell and Dayanik 2009 over what will have been measured).
        0 before any plan ran: until then a trial is judged by what it is, not by what it adds.
        """
        if not self.measured:
            return 0.0
        choices = [*self.measured, plan]
        levels = self.seconds.means[choices]
        slopes = self.seconds.slopes(plan, noise=self.noise)[choices]
        nearer = float(np.min(levels[:-1]) - np.min(levels))
        return float(self.fits[plan]) * (nearer + expected_drop(levels, slopes))

    @cached_property
    def regret(self) -> float:
        """Expected logarithm of the best plan's seconds over those of the plan that is fastest in truth: a share, about.

        0 where nothing is left to choose from.
        """
        if self.best is None:
            return 0.0
        draw = np.random.default_rng(_SEED)
        shape = (_DRAWS, len(self.seconds.means))
        values = self.seconds.drawn(draw.standard_normal(shape))
        runs = draw.random(shape) < self.fits
        runs[:, self.best] = True
        least = np.min(np.where(runs, values, np.inf), axis=1)
        return float(np.mean(values[:, self.best] - least))

    def _fastest(self, plans: Iterable[int]) -> int:
        return min(plans, key=lambda plan: (float(self.seconds.means[plan]), plan))
