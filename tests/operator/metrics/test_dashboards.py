"""Panels of both dashboards show the right numbers, and queries of the page have answers: Prometheus computes each over a failover of two operators."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from answered_plans import BASELINE, FIRST, SECOND, plan_of, status_of, trial
from prometheus import FILES, PANELS, page_queries, panel_queries, prometheus
from prometheus_client import CollectorRegistry

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import (
    ClusterChange,
    ClusterStatus,
    ExcludedNode,
    NodeExclusion,
    RevisionCause,
    TrainingPlanStatus,
    TrialState,
)
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.metrics import Metrics

FIRST_MINUTES, SECOND_MINUTES = 60, 64
"""When the first operator is killed, and when the second, which waited for the lease, has it."""
END_MINUTES = 120
AT = datetime.fromtimestamp(0, UTC) + timedelta(minutes=10)
Series = Mapping[str, float]
Answer = Mapping[str, float]
"""Values by the labels that a panel shows, with commas between."""


def exported(registry: CollectorRegistry, instance: str) -> Series:
    """Return all series as a scrape has them."""
    target = {"job": "trainwright-metrics", "namespace": "system", "instance": instance}
    return {
        name_of(sample.name, {**sample.labels, **target}): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def name_of(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in sorted(labels.items()))}}}"


def condition(kind: ConditionType, state: Any, reason: str, at: datetime = AT) -> Condition:
    return Condition(type=kind, status=state, last_transition_time=at, reason=reason, observed_generation=1)


WAITING = TrainingPlanStatus.model_validate(
    {
        "observedGeneration": 1,
        "conditions": [
            condition(ConditionType.ACCEPTED, "True", "Accepted"),
            condition(ConditionType.NODES_DISCOVERED, "Unknown", "WaitingForCapacity"),
        ],
        "waiting": {"reason": "WaitingForCapacity", "since": AT + timedelta(minutes=20), "earlierSeconds": 300},
    }
)
FAILED = TrainingPlanStatus(conditions=(condition(ConditionType.SUCCEEDED, "False", "NoFeasiblePlan"),))
SUSPENDED = TrainingPlanStatus(conditions=(condition(ConditionType.SUSPENDED, "True", "Suspended"),))
MEMORY = {"predictedPeakMemoryBytes": 10, "peakMemoryBytes": 10}
LOST = trial("candidate-3", 3, 1.0, None, state="Failed", reason="OutOfMemory", predictedPeakMemoryBytes=10)
SPENT = [{"purpose": "Trials", "succeeded": 5400.0, "lost": 1800.0}, {"purpose": "Links", "succeeded": 3600.0}]
ANSWERED = status_of(
    FIRST | MEMORY, SECOND | MEMORY, BASELINE | MEMORY, LOST, at=AT, deviceSeconds=SPENT, profilesMeasuredAt=AT
)


def left_out(**codes: str) -> tuple[ExcludedNode, ...]:
    return tuple(ExcludedNode(name=name, code=NodeExclusion(code), reason="?") for name, code in codes.items())


OUTDATED = ANSWERED.model_copy(
    update={
        "cluster": ANSWERED.cluster.model_copy(  # type: ignore[union-attr]
            update={
                "revision": 2,
                "revision_cause": RevisionCause.SPEED,
                "change": ClusterChange(what="n1: it no longer exists", since=AT),
                "excluded_nodes": left_out(n4="Cordoned", n5="NoDevices"),
            }
        )
    }
)
WAITING = WAITING.model_copy(
    update={"cluster": ClusterStatus(excluded_nodes=left_out(n3="Cordoned", n4="Cordoned", n5="NotReady"))}
)
PENDING = ANSWERED.model_copy(
    update={
        "conditions": (condition(ConditionType.ACCEPTED, "Unknown", "NotStarted"),),
        "trials": tuple(
            one.model_copy(update={"state": TrialState.PENDING, "end_time": None}) for one in ANSWERED.trials
        ),
        "winner": None,
        "device_seconds": (),
    }
)


def operators() -> Iterator[tuple[int, Series, Series]]:
    """Yield since which minute the first and the second operator export what."""
    plans = {name: plan_of(name=name, at=AT) for name in ("good", "later", "waiting", "failing", "suspended")}
    first, second = CollectorRegistry(), CollectorRegistry()
    leader, standby = Metrics(first), Metrics(second)
    leader.leads()
    started = {"good": PENDING, "later": PENDING, "waiting": WAITING, "suspended": SUSPENDED, "failing": PENDING}
    for metrics in (leader, standby):
        metrics.observe_searches(lambda: 1, lambda: 2)
    record(leader, plans, started)
    yield 0, exported(first, "first"), exported(second, "second")
    record(leader, plans, started | {"good": ANSWERED, "failing": FAILED})
    leader.record_reconcile(0.02)
    yield 30, exported(first, "first"), exported(second, "second")
    yield FIRST_MINUTES, {}, exported(second, "second")
    standby.leads()
    present = started | {"good": ANSWERED, "failing": FAILED}
    record(standby, {name: replace(plan, status=present[name]) for name, plan in plans.items()}, present)
    yield SECOND_MINUTES, {}, exported(second, "second")
    record(standby, plans, present | {"later": OUTDATED})
    standby.record_reconcile(0.02)
    standby.record_reconcile_error()
    standby.record_wait(0.05)
    yield 90, {}, exported(second, "second")


def record(metrics: Metrics, plans: Mapping[str, PlanFacts], statuses: Mapping[str, TrainingPlanStatus]) -> None:
    for name, status in statuses.items():
        metrics.record_status(plans[name], status)


def input_series() -> list[dict[str, str]]:
    """Return what Prometheus scraped, once a minute."""
    parts = [(minute, {**first, **second}) for minute, first, second in operators()]
    ends = [*(minute for minute, _ in parts[1:]), END_MINUTES + 1]
    found = []
    for name in sorted({name for _, part in parts for name in part}):
        values, is_there = [], False
        for (minute, part), end in zip(parts, ends, strict=True):
            if name in part:
                values.append(f"{part[name]!r}x{end - minute - 1}")
            else:
                values.append(f"stale _x{end - minute - 1}" if is_there else f"_x{end - minute}")
            is_there = name in part
        found.append({"series": name, "values": " ".join(values)})
    return found


PLAN = ("plan_namespace", "name")
EXPECTED: Mapping[tuple[str, str], tuple[float, tuple[str, ...], Answer]] = {
    ("Operator", "A"): (1, (), {"": 1}),
    ("Failed", "A"): (1, (), {"": 1}),
    ("Suspended", "A"): (1, (), {"": 1}),
    ("Waiting", "A"): (1, (), {"": 1}),
    ("Plans under way", "A"): (
        1, ("phase", "reason"), {"Discovering,WaitingForCapacity": 1, "Suspended,Suspended": 1},
    ),
    ("Finished plans that exist", "A"): (
        1, ("phase", "reason"), {"Failed,NoFeasiblePlan": 1, "Succeeded,BestTrialSelected": 2},
    ),
    ("Where each plan is", "A"): (1, (*PLAN, "phase"), {"team,waiting,Discovering": 110 * 60}),
    ("Where each plan is", "B"): (1, (*PLAN, "reason"), {"team,waiting,WaitingForCapacity": 90 * 60}),
    ("Where each plan is", "C"): (1, PLAN, {"team,waiting": 300}),
    ("Plans that finished", "A"): (
        1, ("result", "reason"), {"succeeded,BestTrialSelected": 2, "failed,NoFeasiblePlan": 1},
    ),
    ("Trials", "A"): (1, ("result", "reason"), {"succeeded,MeasurementTaken": 6, "failed,OutOfMemory": 2}),
    ("Searches", "A"): (1, ("state",), {"running": 1, "waiting": 2}),
    ("Times that were predicted well", "A"): (0.01, (), {"": 0.33}),
    ("Times that were predicted well", "B"): (0.01, (), {"": 0.67}),
    ("Times that were predicted well", "C"): (0.01, (), {"": 0.67}),
    ("Memory that was predicted well", "A"): (0.01, (), {"": 0.75}),
    ("Memory that was predicted well", "B"): (0.01, (), {"": 0.75}),
    ("Memory that was predicted well", "C"): (0.01, (), {"": 0.75}),
    ("Out of memory", "A"): (1, (), {"": 2}),
    ("Predicted over measured time, by accelerator", "A"): (0.1, ("accelerator",), {"mixed": 1}),
    ("Predicted over measured time, by family", "A"): (0.1, ("family",), {"gpt": 1}),
    ("Predicted over measured time, by planner", "A"): (0.1, ("planner",), {"Amp": 1}),
    ("Speed-up over the heuristic", "A"): (0.1, (), {"": 1.9}),
    ("Speed-up over the heuristic", "B"): (0.1, (), {"": 2}),
    ("Regret of the first prediction", "A"): (0.01, (), {"": 0.5}),
    ("Regret of the first prediction", "B"): (0.01, (), {"": 0.5}),
    ("Winners by predicted rank", "A"): (1, ("rank",), {"2": 2}),
    ("Finished plans", "A"): (1, ("result", "reason"), {"succeeded,BestTrialSelected": 2, "failed,NoFeasiblePlan": 1}),
    ("Device-hours spent", "A"): (0.1, ("purpose",), {"links": 2, "trials": 3, "profiles": 0}),
    ("Device-hours spent", "B"): (0.1, (), {"": 1}),
    ("Iterations until measuring is paid back", "A"): (1, (), {"": round(10800 / 13)}),
    ("Age of profiles", "A"): (1, ("accelerator",), {"Tesla-T4": 110 * 60, "Tesla-V100": 110 * 60}),
    ("Outdated plans, by cause", "A"): (1, ("cause",), {"nodes": 1, "speed": 1}),
    ("Nodes left out, by reason", "A"): (1, ("reason",), {"Cordoned": 2, "NotReady": 1, "NoDevices": 1}),
    ("Slow nodes", "A"): (1, (), {"": 0}),
    ("Measurements refuted", "A"): (1, (), {"": 0}),
    ("Winners", "B"): (0.1, PLAN, {"team,good": 2, "team,later": 2}),
    ("Winners", "C"): (0.1, PLAN, {"team,good": 1, "team,later": 1}),
    ("Winners", "D"): (0.1, PLAN, {"team,good": 1.1, "team,later": 1.1}),
    ("Winners", "E"): (1, PLAN, {"team,good": 2, "team,later": 2}),
    ("Winners", "F"): (0.1, PLAN, {"team,good": 0.5, "team,later": 0.5}),
    ("Winners", "G"): (1, PLAN, {"team,good": 3, "team,later": 3}),
    ("Winners", "J"): (1, PLAN, {"team,good": 13, "team,later": 13}),
    ("Winners", "K"): (1, PLAN, {"team,good": round(10800 / 13), "team,later": round(10800 / 13)}),
}  # fmt: skip
"""Values of each panel at the end of the series: the unit of rounding, the labels, and the values."""
OF_THE_PROCESS = {
    "How long a pass takes", "How long a pass waits for its turn", "How long phases take", "Passes over plans",
    "Version", "Waits", "Without an answer from the API server",
}  # fmt: skip
"""Panels whose numbers depend on this machine: that they have data is compared."""
NO_DATA_HERE = {("Winners", letter) for letter in "HIL"}
"""Queries of figures that no plan of this story has."""


OF_NO_PLAN_HERE = ("flop_utilisation", "price_per_sample", "node_speed_ratio")
"""Metrics that the page asks about, and that no plan of this story has."""


def is_read_only(key: tuple[str, str]) -> bool:
    return key[0] in OF_THE_PROCESS or key == ("Winners", "A")


QUERIES = panel_queries("2h")


def test_every_panel_has_an_answer() -> None:
    compared = QUERIES.keys() - NO_DATA_HERE
    assert compared == EXPECTED.keys() | {key for key in compared if is_read_only(key)}


def test_panels_show_the_right_numbers_across_a_failover(tmp_path: Path) -> None:
    cases = []
    for key, expression in QUERIES.items():
        if key in EXPECTED:
            step, labels, answer = EXPECTED[key]
            samples = [
                {
                    "labels": name_of("", dict(zip(labels, shown.split(","), strict=True)) if labels else {}),
                    "value": value,
                }
                for shown, value in answer.items()
            ]
            shown = f"round({expression}, {step})"
            cases.append({"expr": shown, "eval_time": f"{END_MINUTES}m", "exp_samples": samples})
        elif is_read_only(key):
            has_data = f"count({expression}) > bool 0"
            cases.append({"expr": has_data, "eval_time": "92m", "exp_samples": [{"labels": "{}", "value": 1}]})
    blocks = [query for query in page_queries() if not re.search("|".join(OF_NO_PLAN_HERE), query)]
    assert len(blocks) > 12
    cases += [
        {"expr": f"count({one}) > bool 0", "eval_time": "92m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for one in blocks
    ]
    compute(tmp_path, "1m", "5m", input_series(), cases)


def test_no_operator_is_red(tmp_path: Path) -> None:
    (panel,) = (panel for panel in PANELS if panel["title"] == "Operator")
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [(step["value"], step["color"]) for step in steps][:2] == [(None, "red"), (1, "green")]
    leaders = [one for one in input_series() if one["series"].startswith("trainwright_leader")]
    expected = {"30m": 1, f"{FIRST_MINUTES + 2}m": 0, "70m": 1, f"{END_MINUTES + 30}m": 0}
    cases = [
        {"expr": QUERIES["Operator", "A"], "eval_time": time, "exp_samples": [{"labels": "{}", "value": value}]}
        for time, value in expected.items()
    ]
    compute(tmp_path, "1m", "5m", leaders, cases)


@pytest.mark.parametrize("scrape_seconds", [5, 30, 60])
def test_first_events_of_a_namespace_are_shown(tmp_path: Path, scrape_seconds: int) -> None:
    """The first plans of two namespaces fail in their first pass, and in the middle of the first scrape interval."""
    registry, seconds = CollectorRegistry(), 0.0
    metrics = Metrics(registry, unseen_seconds=90.0, clock=lambda: seconds)
    early, late = plan_of("early"), plan_of("late")
    series: dict[str, list[str]] = {}
    failed = FAILED.model_copy(update={"search_seconds": 2.0, "cluster": ANSWERED.cluster})
    for number in range(600 // scrape_seconds):
        if number == 0:
            metrics.record_status(early, failed)
        for name, value in exported(registry, "first").items():
            series.setdefault(name, ["_"] * number).append(repr(value))
        if number == 60 // scrape_seconds:
            metrics.record_status(late, TrainingPlanStatus())
            seconds += scrape_seconds / 2
            metrics.record_status(late, failed)
            seconds -= scrape_seconds / 2
        seconds += scrape_seconds
    scraped = [{"series": name, "values": " ".join(values)} for name, values in series.items()]
    failures = 'round(increase(trainwright_plans_finished_total{reason="NoFeasiblePlan"}[10m])) > 0'
    labels = {"job": "trainwright-metrics", "namespace": "system", "instance": "first"}
    of_namespace = {"result": "failed", "reason": "NoFeasiblePlan", **labels}
    cases = [
        {
            "expr": failures,
            "eval_time": f"{600 - scrape_seconds}s",
            "exp_samples": [
                {"labels": name_of("", {"plan_namespace": namespace, **of_namespace}), "value": 1}
                for namespace in ("early", "late")
            ],
        },
        {
            "expr": "round(sum(increase(trainwright_search_duration_seconds_count[10m])))",
            "eval_time": f"{600 - scrape_seconds}s",
            "exp_samples": [{"labels": "{}", "value": 2}],
        },
    ]
    compute(tmp_path, f"{scrape_seconds}s", "5m", scraped, cases)


SAMPLES_OF_A_DAY = 144
"""One in ten minutes."""


def by_days(name: str, labels: Mapping[str, str], counts: Sequence[int]) -> list[dict[str, str]]:
    """Return a counter of operators of which each works for a day, and counts its events at noon."""
    series = []
    for day, count in enumerate(counts):
        before = f"_x{SAMPLES_OF_A_DAY * day} " if day else ""
        full = name_of(name, {**labels, "job": "j", "instance": str(day)})
        series.append({"series": full, "values": f"{before}0x71 {count}x70 stale"})
    return series


GOOD = [9] * 14 + [2] * 14
"""Trials of each day that were predicted within 20 %, of 10; 3 plans fail a day."""
TRAITS = {"kind": "time", "role": "candidate", "accelerator": "T4", "planner": "Auto", "family": "gpt"}
RATIOS = "trainwright_trial_predicted_over_measured_ratio"
FAILURE = {"plan_namespace": "team", "result": "failed", "reason": "NoFeasiblePlan"}
COUNTS: list[tuple[str, Mapping[str, str], Sequence[int]]] = [
    (f"{RATIOS}_bucket", {**TRAITS, "le": "0.8"}, [0] * 28),
    (f"{RATIOS}_bucket", {**TRAITS, "le": "1.2"}, GOOD),
    (f"{RATIOS}_bucket", {**TRAITS, "le": "+Inf"}, [10] * 28),
    (f"{RATIOS}_count", TRAITS, [10] * 28),
    ("trainwright_plans_finished_total", FAILURE, [3] * 28),
]
"""Counters of 28 days, and what they count each day."""
SHARES = ((1, 0.9), (2, 0.9), (3, 0.2), (4, 0.2))
"""Share of the trials within 20 % by the end of each week."""


def test_weeks_are_right_though_the_operator_is_replaced_every_day(tmp_path: Path) -> None:
    series = [one for name, labels, counts in COUNTS for one in by_days(name, labels, counts)]
    share = f"round({QUERIES['Times that were predicted well', 'C']}, 0.001)"
    # `increase` extrapolates to both ends of its time.
    error = f"abs(({QUERIES['Finished plans', 'A']}) / 21 - 1) < bool 0.03"
    cases: list[dict[str, Any]] = []
    for week, expected in SHARES:
        time = f"{week * 7 * 24 * 60}m"
        cases.append({"expr": share, "eval_time": time, "exp_samples": [{"labels": "{}", "value": expected}]})
        labels = name_of("", {"result": "failed", "reason": "NoFeasiblePlan"})
        cases.append({"expr": error, "eval_time": time, "exp_samples": [{"labels": labels, "value": 1}]})
    compute(tmp_path, "10m", "12h", series, cases)


def test_weeks_of_backfilled_blocks_answer_the_questions_of_the_page(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None or shutil.which("prometheus") is None:
        pytest.skip("promtool or prometheus is not installed")
    day = 24 * 3600
    start = time.time() // day * day - 29 * day
    lines = [
        f"{name_of(name, {**labels, 'instance': str(number)})} {count if sample > 71 else 0} {start + day * number + 600 * sample:.0f}"
        for name, labels, counts in COUNTS
        for number, count in enumerate(counts)
        for sample in range(SAMPLES_OF_A_DAY)
    ]
    (tmp_path / "weeks").write_text("\n".join([*lines, "# EOF\n"]))
    blocks = ("tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=720h", "weeks", "data")
    subprocess.run([promtool, *blocks], cwd=tmp_path, check=True, capture_output=True)
    (share,) = (one for one in page_queries() if 'bucket{kind="time",le="1.2"}' in one)
    (finished,) = (one for one in page_queries() if "trainwright_plans_finished_total" in one)
    with prometheus(tmp_path, {}) as server:
        assert server.samples("vector(1)", seconds=30)
        for week, expected in SHARES:
            at = start + 7 * day * week
            assert server.values(share, "accelerator", at=at) == pytest.approx({"T4": expected}, rel=0.001), week
            shown = server.values(finished, *FAILURE, at=at)
            assert shown == pytest.approx({",".join(FAILURE.values()): 21}, rel=0.03), week


def compute(
    tmp_path: Path, scrape: str, evaluation: str, series: list[dict[str, str]], cases: list[dict[str, Any]]
) -> None:
    """Let Prometheus compute expressions on series, and compare the results. `evaluation`: how often it sums weeks."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    records = [
        {"name": group["name"], "interval": evaluation, "rules": [rule for rule in group["rules"] if "record" in rule]}
        for group in groups
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [group for group in records if group["rules"]]}))
    test = {"interval": scrape, "input_series": series, "promql_expr_test": cases}
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": evaluation, "tests": [test]})
    )
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
