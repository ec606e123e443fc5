"""Gauges of the plans as they stand: made anew at every scrape, so that they survive a restart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trainwright_operator.api.conditions import PHASE_CONDITIONS, Condition, ConditionType
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.metrics.table import TABLE

Key = tuple[str, str]
"""A plan: its namespace and its name."""


_FIGURES: Final = {
    "trainwright_plan_predicted_seconds": ("winner", "predicted_seconds"),
    "trainwright_plan_measured_seconds": ("winner", "measured_seconds"),
    "trainwright_winner_predicted_rank": ("winner", "predicted_rank"),
    "trainwright_speedup_over_baseline_ratio": ("winner", "speedup_over_baseline"),
    "trainwright_collective_error_ratio": ("links", "collective_error"),
}
"""By name of the metric: a part of the status, and its field."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is shown of one plan: its status may have a thousand nodes, which nobody asks for here.

    Attributes:
        figures: by name of the metric.
        conditions: type and status of each.
        phase: the condition that it works towards, that one's reason, and since when (Unix time).
        profiled: accelerators, and when they were (Unix time).
    """

    figures: Mapping[str, float]
    conditions: tuple[tuple[str, str], ...]
    phase: tuple[str, str, float] | None
    profiled: tuple[tuple[str, ...], float]

    @classmethod
    def of(cls, plan: PlanFacts, status: TrainingPlanStatus) -> Standing:
        """Of a plan with this status."""
        figures = {name: getattr(getattr(status, part), field, None) for name, (part, field) in _FIGURES.items()}
        known = {condition.type: condition for condition in status.conditions}
        profiled = known.get(ConditionType.PROFILED)
        names: tuple[str, ...] = ()
        if profiled is not None and profiled.status == "True" and status.cluster is not None:
            names = tuple(accelerator.name for accelerator in status.cluster.accelerators)
        return cls(
            {name: float(value) for name, value in figures.items() if value is not None},
            tuple((condition.type.value, condition.status) for condition in status.conditions),
            _phase(plan, known),
            (names, profiled.last_transition_time.timestamp() if profiled is not None else 0.0),
        )


def worked_on_since(plan: PlanFacts, suspended: Condition | None) -> datetime:
    """When it was created, or its last suspension ended."""
    return plan.created_at if suspended is None else max(plan.created_at, suspended.last_transition_time)


def _phase(plan: PlanFacts, known: Mapping[ConditionType, Condition]) -> tuple[str, str, float] | None:
    """None where the plan is finished or suspended."""
    suspended, succeeded = known.get(ConditionType.SUSPENDED), known.get(ConditionType.SUCCEEDED)
    if (suspended is not None and suspended.status == "True") or (
        succeeded is not None and succeeded.status != "Unknown"
    ):
        return None
    since = worked_on_since(plan, suspended)
    for kind in PHASE_CONDITIONS:
        condition = known.get(kind)
        if condition is None:
            return kind.value, "", since.timestamp()
        since = max(since, condition.last_transition_time)
        if condition.status != "True":
            return kind.value, condition.reason, since.timestamp()
    return None


class Plans(Collector):
    """The gauges of all plans."""

    def __init__(self) -> None:
        self._standings: dict[Key, Standing] = {}

    def stands(self, key: Key, standing: Standing) -> None:
        """The plan stands like that now."""
        self._standings[key] = standing

    def forget(self, key: Key) -> None:
        """The plan is gone."""
        self._standings.pop(key, None)

    def collect(self) -> Iterable[Metric]:
        standings = dict(self._standings)
        yield from _figures(standings)
        yield _conditions(standings)
        yield _phases(standings)
        yield _profiles(standings)


def _figures(standings: Mapping[Key, Standing]) -> Iterator[Metric]:
    for name in _FIGURES:
        family = _family(name)
        for key, standing in standings.items():
            if name in standing.figures:
                family.add_metric(key, standing.figures[name])
        yield family


def _conditions(standings: Mapping[Key, Standing]) -> Metric:
    family = _family("trainwright_plans")
    for labels, count in Counter(pair for standing in standings.values() for pair in standing.conditions).items():
        family.add_metric(labels, count)
    return family


def _phases(standings: Mapping[Key, Standing]) -> Metric:
    family = _family("trainwright_plan_phase_start_timestamp_seconds")
    for key, standing in standings.items():
        if standing.phase is not None:
            kind, reason, since = standing.phase
            family.add_metric((*key, kind, reason), since)
    return family


def _profiles(standings: Mapping[Key, Standing]) -> Metric:
    newest: dict[str, float] = {}
    for names, moment in (standing.profiled for standing in standings.values()):
        for name in names:
            newest[name] = max(moment, newest.get(name, moment))
    family = _family("trainwright_profile_age_seconds")
    for name, moment in newest.items():
        family.add_metric([name], max(time.time() - moment, 0.0))
    return family


def _family(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, TABLE[name].help, labels=list(TABLE[name].labels))
