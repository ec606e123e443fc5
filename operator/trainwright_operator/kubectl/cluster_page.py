"""`trainwright report --cluster`: the plans that exist as one page, by the figures that the metrics are made of.

It answers the questions of docs/metrics-and-alerts.md for the present. What happened over weeks, and plans that are gone,
only Prometheus knows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any, Final
from xml.etree.ElementTree import Element

from trainwright.report.page.bar_figures import dot, rectangle
from trainwright.report.page.cluster_figures import MAX_NODES
from trainwright.report.page.markup import Content, Row, bar, document, element, figure, missing_rows, table, words
from trainwright.report.units import duration, money, seconds
from trainwright_operator.api.status import Phase, TrialState
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.kubectl.client import PLANS, Kubectl, KubectlError, explained
from trainwright_operator.plan_figures import PlanFigures, plan_figures
from trainwright_operator.plan_resource import plan_facts

MAX_PLANS: Final = 200
"""Maximum number of rows of a table of plans."""
_HOLDS: Final = 0.2
"""Share by which a prediction may be off and still holds, as in the dashboards."""
_SLOW: Final = 1.1
"""Ratio of a node's seconds to those kept of it from which it is listed as slow."""
_MAX_RATIO: Final = 2.0
"""Greatest ratio of predicted to measured that a drawing shows where it is."""
_HOUR: Final = 3600.0
_ENDED: Final = (Phase.SUCCEEDED, Phase.FAILED, Phase.SUSPENDED)


@dataclass(frozen=True)
class _Plan:
    """Plan with its figures."""

    namespace: str
    name: str
    figures: PlanFigures

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def is_waiting(self) -> bool:
        return bool(self.figures.waits.reason) and self.figures.stage.phase not in _ENDED

    def wait_seconds(self, now: datetime) -> float:
        """Return seconds of all waits since the last edit of the spec."""
        since = self.figures.waits.since
        return self.figures.waits.earlier_seconds + ((now - since).total_seconds() if since is not None else 0.0)


def cluster_page(kubectl: Kubectl) -> str:
    """Return the page of the plans of a namespace, or else of all. Raise KubectlError where these may not be listed."""
    where = () if kubectl.namespace is not None else ("--all-namespaces",)
    try:
        items = kubectl.get(PLANS, *where)["items"]
    except KubectlError as error:
        if error.is_forbidden and where:
            raise KubectlError(
                f"you may not list the plans of all namespaces; name one that you may read with --namespace: {error}"
            ) from None
        raise explained(error, "plans", kubectl.namespace) from None
    return page_of(items, datetime.now(UTC), kubectl.namespace)


def page_of(resources: Iterable[Mapping[str, Any]], now: datetime, namespace: str | None) -> str:
    """Return the page of TrainingPlans as the API server lists them."""
    plans = []
    for resource in resources:
        facts = plan_facts(dict(resource), "")
        plans.append(_Plan(facts.namespace, facts.name, plan_figures(facts, facts.status)))
    plans.sort(key=lambda plan: plan.full_name)
    where = f"the namespace {namespace}" if namespace is not None else "all namespaces"
    title = f"{len(plans)} TrainingPlans of {where}"
    reading = f"As read at {now:%Y-%m-%d %H:%M} UTC with the rights of whoever asked."
    weeks = (
        "What happened over weeks needs Prometheus: trends, plans that were deleted, how long phases took. "
        "docs/metrics-and-alerts.md has the queries."
    )
    button = element("button", "Theme", id="theme", type="button", hidden="hidden")
    sections = [
        _section("Who waits, for what, and for how long?", _waits(plans, now)),
        _section("How good are predictions?", _predictions(plans)),
        _section("Did ranking work?", _ranking(plans)),
        _section("What did measuring cost, and when is it paid back?", _costs(plans)),
        _section("Which plans are outdated?", _outdated(plans)),
        _section("Which nodes are slow or left out?", _nodes(plans)),
        _section("How old are the measurements?", _ages(plans, now)),
        _section("All plans", _all(plans)),
    ]
    lead = [element("p", _summary(plans), class_="lead"), element("p", reading), element("p", weeks)]
    head = element("header", element("h1", title), button)
    return document(f"Trainwright: {title}", head, lead, _tiles(plans), sections)


def _section(heading: str, content: Content) -> Element:
    return element("section", element("h2", heading), content)


def _none(sentence: str) -> Element:
    return element("p", sentence, class_="note")


def _summary(plans: Sequence[_Plan]) -> str:
    phases = Counter(plan.figures.stage.phase for plan in plans)
    under_way = sum(count for phase, count in phases.items() if phase not in _ENDED)
    waiting = sum(plan.is_waiting for plan in plans)
    counts = [
        f"{phases[Phase.SUCCEEDED]} have their answer",
        f"{phases[Phase.FAILED]} failed",
        f"{under_way} are under way, of which {waiting} wait",
        f"{phases[Phase.SUSPENDED]} are suspended",
    ]
    return f"{', '.join(counts)}."


def _tiles(plans: Sequence[_Plan]) -> Element:
    ratios = [trial.time_ratio for plan in plans for trial in plan.figures.trials if trial.time_ratio is not None]
    speedups = [value for plan in plans if (value := plan.figures.answer.speedup_over_baseline_ratio) is not None]
    spent = sum(sum(plan.figures.device_seconds.values()) for plan in plans) / _HOUR
    entries = [
        (str(len(plans)), "plans"),
        (f"{spent:.3g}", "device hours of measuring"),
        (_held(ratios), f"of {len(ratios)} predictions within {_HOLDS:.0%}") if ratios else None,
        (f"{median(speedups):.2f} ×", "as fast as the heuristic, the median answer") if speedups else None,
    ]
    shown = [element("li", element("b", entry[0]), element("span", entry[1])) for entry in entries if entry is not None]
    return element("ul", shown, class_="tiles")


def _waits(plans: Sequence[_Plan], now: datetime) -> Element:
    waiting = [plan for plan in plans if plan.is_waiting]
    if not waiting:
        return _none("No plan waits.")
    waiting.sort(key=lambda plan: -plan.wait_seconds(now))
    longest = waiting[0].wait_seconds(now)
    rows: list[Row] = [
        [
            plan.full_name,
            bar(rectangle("gradients", 0, plan.wait_seconds(now), longest), label=duration(plan.wait_seconds(now))),
            duration(plan.wait_seconds(now)),
            words(plan.figures.waits.reason),
            words(plan.figures.stage.phase),
        ]
        for plan in waiting[:MAX_PLANS]
    ]
    headings = ["plan", "", "since the last edit", "for", "in phase"]
    return table(headings, rows, label="Waiting plans", left_out=_left_out(waiting, "plans that waited less"))


def _predictions(plans: Sequence[_Plan]) -> Element:
    by_kind = defaultdict[tuple[str, str, bool], list[float]](list)
    out_of_memory = Counter[tuple[str, str, bool]]()
    for plan in plans:
        traits = plan.figures.traits
        for trial in plan.figures.trials:
            key = trial.accelerator, traits.planner, traits.emulated
            if trial.time_ratio is not None:
                by_kind[key].append(trial.time_ratio)
            out_of_memory[key] += trial.state is TrialState.FAILED and trial.reason == Reason.OUT_OF_MEMORY
    keys = sorted({*by_kind, *(key for key, count in out_of_memory.items() if count)})
    if not keys:
        return _none("No trial has been measured.")
    rows: list[Row] = []
    for key in keys:
        accelerator, planner, emulated = key
        ratios = by_kind[key]
        marks = [dot("measured", min(ratio, _MAX_RATIO), _MAX_RATIO) for ratio in ratios[:MAX_PLANS]]
        drawing = bar(rectangle("c1", 1 - _HOLDS, 2 * _HOLDS, _MAX_RATIO), marks, label=f"{len(ratios)} predictions")
        name = f"{accelerator or 'unknown'}, {planner}{' (emulated)' if emulated else ''}"
        middle = f"{median(ratios):.2f}" if ratios else ""
        rows.append([name, drawing, str(len(ratios)), _held(ratios), middle, str(out_of_memory[key])])
    headings = [
        "device and planner",
        f"0 to {_MAX_RATIO:g}",
        "trials",
        f"within {_HOLDS:.0%}",
        "median",
        "out of memory",
    ]
    return figure(
        f"Predicted over measured seconds of each trial that counts; the band is {_HOLDS:.0%} either way, and above 1 trials were "
        "faster than predicted.",
        table(headings, rows, label="Predictions"),
    )


def _ranking(plans: Sequence[_Plan]) -> Element:
    answers = [plan.figures.answer for plan in plans]
    ranks = Counter(int(answer.predicted_rank) for answer in answers if answer.predicted_rank is not None)
    if not ranks:
        return _none("No plan has compared candidates.")
    regrets = [answer.regret_ratio for answer in answers if answer.regret_ratio is not None]
    most = max(ranks.values())
    rows: list[Row] = [
        [f"rank {rank}", bar(rectangle("forward", 0, count, most), label=f"{count} winners"), str(count)]
        for rank, count in sorted(ranks.items())
    ]
    lost = (
        f" The best prediction was {fmean(regrets):.1%} slower than the winner on average, {max(regrets):.1%} at most."
        if regrets
        else ""
    )
    return figure(
        f"Winners by their place among the predictions, of plans that compared candidates.{lost}",
        table(["predicted as", "", "winners"], rows, label="Ranks of winners"),
    )


def _costs(plans: Sequence[_Plan]) -> Element:
    spent = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for plan in plans:
        for (purpose, result), value in plan.figures.device_seconds.items():
            spent[plan.namespace][purpose] += value / _HOUR
            if result != "succeeded":
                spent[plan.namespace]["lost or failed"] += value / _HOUR
    purposes = ["Links", "Profiles", "Trials"]
    rows: list[Row] = [
        [namespace, *(f"{hours[purpose]:.3g}" for purpose in (*purposes, "lost or failed"))]
        for namespace, hours in sorted(spent.items())
    ]
    if not rows:
        return _none("Nothing has been measured.")
    paid = [plan for plan in plans if plan.figures.answer.payback_iterations is not None]
    paid.sort(key=lambda plan: plan.figures.answer.payback_iterations or 0.0)
    payback: list[Row] = [
        [
            plan.full_name,
            f"{plan.figures.answer.payback_iterations:,.0f}",
            f"{plan.figures.answer.saved_device_seconds_per_iteration:.3g} s",
        ]
        for plan in paid[:MAX_PLANS]
    ]
    headings = ["namespace", *map(str.lower, purposes), "of these lost or failed"]
    return figure(
        "Device hours by purpose; then after how many iterations an answer has saved what its measuring took, against the "
        "heuristic's plan.",
        table(headings, rows, label="Device hours"),
        table(
            ["plan", "paid back after iterations", "device seconds saved by each"],
            payback,
            label="Payback",
            left_out=_left_out(paid, "plans that pay back later"),
        )
        if payback
        else None,
    )


def _outdated(plans: Sequence[_Plan]) -> Element:
    outdated = [plan for plan in plans if plan.figures.outdated_by]
    rows: list[Row] = [[plan.full_name, words(", ".join(sorted(plan.figures.outdated_by)))] for plan in outdated]
    if not rows:
        return _none("None is.")
    return table(["plan", "by"], rows[:MAX_PLANS], label="Outdated plans", left_out=_left_out(outdated, "plans"))


def _nodes(plans: Sequence[_Plan]) -> Element:
    """Return the speeds of checked nodes, by type of device where they are many, and the nodes that are left out by reason."""
    last: dict[tuple[str, str], tuple[datetime, float]] = {}
    excluded = defaultdict[str, set[str]](set)
    for plan in plans:
        at = plan.figures.checked_at
        for node, ratio in plan.figures.node_speeds.items():
            if at is not None and (node not in last or at > last[node][0]):
                last[node] = at, ratio
        for code, names in plan.figures.excluded_nodes.items():
            excluded[code or "unknown"].update(names)
    speeds = {node: ratio for node, (_, ratio) in last.items()}
    reasons: list[Row] = [[code, str(len(names))] for code, names in sorted(excluded.items())]
    return element(
        "div",
        _speeds(speeds) if speeds else _none("No node's speed was checked against what was kept of it."),
        table(["left out, by reason", "nodes"], reasons, label="Nodes left out")
        if reasons
        else _none("No node is left out."),
    )


def _speeds(speeds: Mapping[tuple[str, str], float]) -> Element:
    caption = (
        "Seconds of a layer before a trial over those that were kept of the node, at its last check: above 1 is slower."
    )
    if len(speeds) <= MAX_NODES:
        slowest = max(speeds.values())
        rows: list[Row] = [
            [
                name,
                words(accelerator),
                bar(rectangle("message" if ratio >= _SLOW else "forward", 0, ratio, slowest), label=f"{ratio:.2f}"),
                f"{ratio:.2f}",
            ]
            for (name, accelerator), ratio in sorted(speeds.items(), key=lambda item: -item[1])
        ]
        return figure(caption, table(["node", "device", "", "ratio"], rows, label="Speeds of nodes"))
    by_accelerator = defaultdict[str, list[float]](list)
    for (_, accelerator), ratio in speeds.items():
        by_accelerator[accelerator].append(ratio)
    groups: list[Row] = [
        [
            accelerator,
            str(len(ratios)),
            str(sum(ratio >= _SLOW for ratio in ratios)),
            f"{median(ratios):.2f}",
            f"{max(ratios):.2f}",
        ]
        for accelerator, ratios in sorted(by_accelerator.items())
    ]
    slow = f"slower by {_SLOW - 1:.0%} or more"
    return figure(
        f"{caption} By type of device, since there are more than {MAX_NODES} nodes.",
        table(["device", "nodes", slow, "median", "slowest"], groups, label="Speeds by type of device"),
    )


def _ages(plans: Sequence[_Plan], now: datetime) -> Element:
    newest: dict[str, datetime] = {}
    for plan in plans:
        at = plan.figures.profiles_measured_at
        if at is not None:
            newest |= {name: max(at, newest.get(name, at)) for name in plan.figures.traits.accelerators}
    if not newest:
        return _none("No plan has profiles.")
    rows: list[Row] = [
        [accelerator, duration((now - at).total_seconds()), f"{at:%Y-%m-%d %H:%M} UTC"]
        for accelerator, at in sorted(newest.items())
    ]
    return table(["device", "newest profiles are of", "measured at"], rows, label="Age of profiles")


def _all(plans: Sequence[_Plan]) -> Element:
    if not plans:
        return _none("There are none.")
    rows: list[Row] = []
    for plan in plans[:MAX_PLANS]:
        figures, answer = plan.figures, plan.figures.answer
        rows.append(
            [
                plan.full_name,
                words(f"{figures.stage.phase}: {figures.stage.reason}".removesuffix(": ")),
                words(" and ".join(figures.traits.accelerators)),
                _figure(answer.measured_iteration_seconds, seconds),
                _figure(answer.predicted_iteration_seconds, seconds),
                _figure(answer.speedup_over_baseline_ratio, "{:.2f} ×".format),
                _figure(answer.predicted_rank, "{:.0f}".format),
                _figure(answer.model_flop_utilisation_ratio, "{:.1%}".format),
                _figure(answer.tokens_per_second_per_device, "{:,.0f}".format),
                _figure(answer.price_per_sample, money),
                words("emulated" if figures.traits.emulated else ""),
            ]
        )
    headings = [
        "plan", "state", "devices", "measured", "predicted", "speed-up", "rank", "MFU", "tok/s/GPU", "price/sample", "",
    ]  # fmt: skip
    return figure(
        "Seconds of an iteration of the answer; speed-up over the heuristic's best measured plan; rank among the predictions.",
        table(headings, rows, label="All plans", left_out=_left_out(plans, "plans")),
    )


def _held(ratios: Sequence[float]) -> str:
    return f"{sum(abs(ratio - 1) <= _HOLDS for ratio in ratios) / len(ratios):.0%}" if ratios else ""


def _figure(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _left_out(rows: Sequence[object], what: str) -> str:
    shown = min(len(rows), MAX_PLANS)
    return missing_rows(shown, len(rows), what, "; --namespace shows one namespace alone")
