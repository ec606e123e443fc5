"""Several plans to be tried one after another, and what was measured of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.model import Model
from trainwright.orders.gang import Gang
from trainwright.orders.trial import TrialOrder, TrialReport
from trainwright.plan import Plan


@dataclass(frozen=True, slots=True)
class SeriesOrder:
    """Several trials in one gang, one after another, since starting one takes longer than most trials.

    Attributes:
        plans: each uses some of the gang's devices, in any order; the other devices wait meanwhile.
        timeline, sequence_parallel: of every plan.
    """

    gang: Gang
    model: Model
    plans: tuple[Plan, ...]
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    seed: int = 0
    warmup_iterations: int = 3
    iterations: int = 10
    track_memory: bool = True
    timeline: bool = False
    sequence_parallel: bool = False
    kind: Literal["series"] = "series"

    def trial(self, number: int) -> TrialOrder:
        """The trial of one of the plans."""
        return TrialOrder(
            self.gang,
            self.model,
            self.plans[number],
            self.optimizer,
            self.learning_rate,
            self.seed,
            self.warmup_iterations,
            self.iterations,
            self.track_memory,
            timeline=self.timeline,
            sequence_parallel=self.sequence_parallel,
        )


@dataclass(frozen=True, slots=True)
class SeriesReport:
    """The measurements of a series' trials, in the order of its plans."""

    trials: tuple[TrialReport, ...]
    kind: Literal["series"] = "series"


@dataclass(frozen=True, slots=True)
class SeriesPart:
    """A trial of a series, told as soon as it is measured: what fails after it does not take it along.

    Attributes:
        number: of its plan in the order, from 0.
    """

    number: int
    trial: TrialReport
