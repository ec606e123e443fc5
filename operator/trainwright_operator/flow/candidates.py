"""The document that the search leaves behind: the plans to try, in the order in which they are tried."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainwright.plan import LayerRun, Plan

BASELINES = 2
"""The better measured one of the heuristic's best two predictions counts, as in the AMP paper (section 5)."""


class Role(StrEnum):
    """Whose plan it is."""

    CANDIDATE = "Candidate"
    BASELINE = "Baseline"


def digest(plan: Plan) -> str:
    """Equal for equal plans, also where a later version says more of a plan than this one."""
    pipelines = [
        [
            pipeline.micro_batches,
            [[list(map(str, stage.devices)), [_said(run) for run in stage.layers]] for stage in pipeline.stages],
        ]
        for pipeline in plan.pipelines
    ]
    return hashlib.sha256(json.dumps([plan.schedule, pipelines]).encode()).hexdigest()[:16]


def _said(run: LayerRun) -> list[Any]:
    return [run.first, run.count, run.tensor, run.data, run.rows, run.order, run.sharding, run.recompute]


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A plan with its prediction.

    Attributes:
        counts_as_baseline: also among the heuristic's best, so that its measurement counts for both.
        rank: place among the predictions of its role, from 1.
        overall_rank: place among all predictions here, from 1.
    """

    name: str
    role: Role
    counts_as_baseline: bool
    rank: int
    overall_rank: int
    predicted_seconds: float
    predicted_peak_memory_bytes: int
    summary: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """How far off the predictions may be.

    Attributes:
        covariance: [trial, trial]: of the logarithms of the predicted seconds.
        memory_shares: [trial]: predicted share of its memory that the fullest device takes.
    """

    covariance: tuple[tuple[float, ...], ...]
    memory_shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlannedTrials:
    """What is to be tried.

    Attributes:
        uncertainty: None in documents of former versions: then trials are made in their order.
        stopped_by_budget: whether the search had no time to look at everything.
        without_room: so many more plans are not tried, as one ConfigMap does not hold them.
    """

    planner: str
    search_seconds: float
    trials: tuple[PlannedTrial, ...]
    uncertainty: Uncertainty | None = None
    stopped_by_budget: bool = False
    without_room: int = 0

    @property
    def best(self) -> PlannedTrial:
        """The planner's first candidate."""
        return min(self.trials, key=lambda trial: (trial.role is not Role.CANDIDATE, trial.rank))
