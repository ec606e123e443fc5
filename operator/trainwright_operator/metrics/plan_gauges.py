"""Gauges of all plans at each scrape, from their figures."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trainwright_operator.metrics.definitions import METRIC_DEFINITIONS
from trainwright_operator.metrics.series import OTHER
from trainwright_operator.plan_figures import AnswerFigures, PlanFigures

Key = tuple[str, str]
"""Namespace and name of a plan."""


class PlanCollector(Collector):
    """Collector of all plans' gauges."""

    def __init__(self) -> None:
        self._figures: dict[Key, PlanFigures] = {}

    def update(self, key: Key, figures: PlanFigures) -> None:
        """Set the plan's current figures."""
        self._figures[key] = figures

    def figures_of(self, key: Key) -> PlanFigures | None:
        """Return the plan's last figures, or None if it was not seen before."""
        return self._figures.get(key)

    def forget(self, key: Key) -> None:
        """Remove a deleted plan."""
        self._figures.pop(key, None)

    def collect(self) -> Iterable[Metric]:
        plans = dict(self._figures)
        yield from _answers(plans)
        yield _information(plans)
        yield _stages(plans)
        yield _phase_starts(plans)
        yield from _waits(plans)
        yield _profiles(plans)
        yield _node_speeds(plans)
        yield _of_plans("trainwright_plan_internal_error", plans, lambda plan: plan.is_quarantined)
        yield _outdated(plans)
        yield _excluded_nodes(plans)


def _answers(plans: Mapping[Key, PlanFigures]) -> Iterator[Metric]:
    for field in fields(AnswerFigures):
        family = _family(f"trainwright_plan_{field.name}")
        for key, figures in plans.items():
            value = getattr(figures.answer, field.name)
            if value is not None:
                family.add_metric(key, value)
        yield family


def _stages(plans: Mapping[Key, PlanFigures]) -> Metric:
    family = _family("trainwright_plans")
    stages = Tally((namespace, plan.stage.phase, plan.stage.reason) for (namespace, _), plan in plans.items())
    for labels, count in stages.items():
        family.add_metric(labels, count)
    return family


def _phase_starts(plans: Mapping[Key, PlanFigures]) -> Metric:
    family = _family("trainwright_plan_phase_start_timestamp_seconds")
    for key, plan in plans.items():
        if plan.stage.since is not None:
            family.add_metric((*key, plan.stage.phase, plan.stage.reason), plan.stage.since.timestamp())
    return family


def _waits(plans: Mapping[Key, PlanFigures]) -> Iterator[Metric]:
    since = _family("trainwright_plan_waiting_since_timestamp_seconds")
    earlier = _family("trainwright_plan_earlier_wait_seconds")
    of_phase = _family("trainwright_plan_phase_wait_seconds")
    for key, plan in plans.items():
        if plan.stage.since is None:
            continue
        earlier.add_metric(key, float(plan.waits.earlier_seconds))
        of_phase.add_metric(key, float(plan.waits.phase_seconds))
        if plan.waits.since is not None:
            since.add_metric((*key, plan.waits.reason), plan.waits.since.timestamp())
    yield from (since, earlier, of_phase)


def _outdated(plans: Mapping[Key, PlanFigures]) -> Metric:
    family = _family("trainwright_plan_outdated")
    for key, plan in plans.items():
        for cause in sorted(plan.outdated_by):
            family.add_metric((*key, cause), 1.0)
    return family


def _profiles(plans: Mapping[Key, PlanFigures]) -> Metric:
    newest: dict[str, float] = {}
    for plan in plans.values():
        if plan.profiles_measured_at is not None:
            for name in plan.traits.accelerators:
                newest[name] = max(plan.profiles_measured_at.timestamp(), newest.get(name, 0.0))
    family = _family("trainwright_profile_timestamp_seconds")
    for name, seconds in newest.items():
        family.add_metric([name], seconds)
    return family


def _node_speeds(plans: Mapping[Key, PlanFigures]) -> Metric:
    last: dict[tuple[str, str], tuple[datetime, float]] = {}
    for plan in plans.values():
        for node, ratio in plan.node_speeds.items():
            if plan.checked_at is not None and (node not in last or plan.checked_at > last[node][0]):
                last[node] = plan.checked_at, ratio
    family = _family("trainwright_node_speed_ratio")
    for node, (_, ratio) in last.items():
        family.add_metric(node, ratio)
    return family


def _excluded_nodes(plans: Mapping[Key, PlanFigures]) -> Metric:
    names: dict[str, set[str]] = {}
    for plan in plans.values():
        for code, excluded in plan.excluded_nodes.items():
            names.setdefault(code or OTHER, set()).update(excluded)
    family = _family("trainwright_excluded_nodes")
    for reason, nodes in names.items():
        family.add_metric([reason], float(len(nodes)))
    return family


def _of_plans(name: str, plans: Mapping[Key, PlanFigures], value: Callable[[PlanFigures], float]) -> Metric:
    """Return a value of each plan where it is not 0."""
    family = _family(name)
    for key, plan in plans.items():
        if value(plan):
            family.add_metric(key, float(value(plan)))
    return family


def _information(plans: Mapping[Key, PlanFigures]) -> Metric:
    family = _family("trainwright_plan_info")
    for key, plan in plans.items():
        traits = plan.traits
        further = (",".join(traits.accelerators), traits.launcher, traits.queue, traits.dtype)
        family.add_metric((*key, *traits.labels(traits.accelerator), *further), 1.0)
    return family


def _family(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, METRIC_DEFINITIONS[name].help, labels=list(METRIC_DEFINITIONS[name].labels))
