"""Panels of both dashboards, alerts and the page's queries show the right numbers in a real Prometheus at two scrape intervals.

Real operators, a leader and a standby, work on plans of a real API server through a wave of trials, a kill amid another, a
failover, a change of nodes and a deletion. Kubelets and workers are simulated. The right numbers are computed from the plans' statuses.
"""

from __future__ import annotations

import re
import statistics
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from flow_reports import report_of
from operator_process import until
from prometheus import FILES, Prometheus, Query, page_queries, panel_queries, prometheus
from simulated_nodes import simulated_nodes
from soak_cluster import NAMESPACE, cluster, node, operator, plan

from trainwright.worker_api import Failure, FailureReason, TrialTask, WorkerTask
from trainwright_operator.kube.main import UNSEEN_SECONDS
from trainwright_operator.metrics.plan_events import _PHASE_BUCKETS as PHASE_BUCKETS
from trainwright_operator.metrics.plan_events import _RATIO_BUCKETS as RATIO_BUCKETS
from trainwright_operator.metrics.plan_events import _SPEEDUP_BUCKETS as SPEEDUP_BUCKETS

JOBS = {"every-5": 5, "every-30": 30}


def run_seconds(gang: str) -> float:
    """Return for how long a gang runs: links, like all trials of a plan, longer than both scrape intervals.

    So the series in which they count were seen at 0.
    """
    return 33.0 if gang == "links" else 11.0


SIZES = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
Values = Mapping[str, float]
Status = Mapping[str, Any]
CONDITIONS = ("Accepted", "NodesDiscovered", "LinksMeasured", "Profiled", "Planned", "TrialsCompleted", "Succeeded")
PRINTED = dict(
    zip(
        CONDITIONS,
        ("Pending", "Discovering", "MeasuringLinks", "Profiling", "Planning", "Trying", "Trying"),
        strict=True,
    )
)


class Workers:
    """Simulated workers: of every other plan each trial is slower than the one before, of the others it is faster."""

    def __init__(self) -> None:
        self._trials: dict[str, int] = {}

    def report(self, task: WorkerTask) -> Any:
        """Return what the workers of a task report; a trial that is to crash runs out of memory."""
        if not isinstance(task, TrialTask):
            return report_of(task)
        if task.fault == "crash":
            return Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB", rank=0)
        model = repr(task.model)
        number = self._trials[model] = self._trials.get(model, 0) + 1
        is_slowing = list(self._trials).index(model) % 2 == 0
        seconds = 0.8 + 0.1 * number if is_slowing else 1.4 - 0.1 * number
        return replace(report_of(task), iteration_seconds=(seconds, seconds))


def quick(name: str, *, fault: str = "", **further: Any) -> dict[str, Any]:
    """Return a plan that takes about a minute of simulated gangs, and reuses nothing."""
    spec = {
        "model": {"gpt": SIZES | {"vocabularySize": 512 + 64 * (zlib.crc32(name.encode()) % 64)}},
        "devices": {"max": 4, "pricesPerHour": {"emulated-v100": 2.0}},
        "trials": {"topK": 2},
        "search": {"planner": "Amp", "limits": {"maxTensorDegree": 2}},
        "training": {"globalBatchSize": 8, "dtype": "float32"},
        "links": {"maxAgeSeconds": 0},
        "profiling": {"maxAgeSeconds": 0},
        **further,
    }
    made = plan(name, spec)
    if fault:
        made["metadata"]["annotations"] = {"trainwright.dev/rehearse-fault": fault}
    return made


def hurried_rules() -> Any:
    """Return the rules of the chart, which wait seconds where those wait minutes and hours."""
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    for group in groups:
        group["interval"] = "5s"
        for rule in group["rules"]:
            if "alert" in rule:
                rule["expr"] = re.sub(r"> (3600|780|14400)\b", "> 20", rule["expr"])
                rule |= {"for": "1s", "annotations": {}}
                rule.pop("keep_firing_for", None)
    return {"groups": groups}


@dataclass(frozen=True)
class Story:
    """Statuses of every plan at its end and of those that still exist, by name, and the Prometheus that saw them.

    Attributes:
        started: when the first operator led.
        killed: when the first one was killed.
        ended: when all was over, and was scraped.
    """

    prometheus: Prometheus
    statuses: Mapping[str, Status]
    existing: Mapping[str, Status]
    started: float
    killed: float
    ended: float


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with run_story(tmp_path_factory.mktemp("story")) as story:
        yield story


@contextmanager
def run_story(folder: Path) -> Iterator[Story]:
    """Let everything happen, which takes five minutes; the operator and Prometheus run until the block ends."""
    with ExitStack() as stack:
        api = stack.enter_context(cluster(nodes=0))
        _, port = stack.enter_context(
            simulated_nodes(api, NAMESPACE, folder, run_seconds=run_seconds, report=Workers().report)
        )
        api.kubectl("create", document=[node(number, kubelet_port=port) for number in range(10)])
        leader_stack = stack.enter_context(ExitStack())
        leader = leader_stack.enter_context(operator(api))
        standby = stack.enter_context(operator(api))
        targets = [f"127.0.0.1:{one.metrics_port}" for one in (leader, standby)]
        server = stack.enter_context(
            prometheus(folder, {name: (seconds, targets) for name, seconds in JOBS.items()}, hurried_rules())
        )
        started = time.time()

        def statuses() -> dict[str, Status]:
            items = api.get("trainingplans", "--namespace", NAMESPACE)["items"]
            return {
                one["metadata"]["name"]: one.get("status", {}) | {"created": one["metadata"]["creationTimestamp"]}
                for one in items
            }

        def answered(*names: str) -> Callable[[], bool]:
            return lambda: all(statuses()[name].get("phase") in ("Succeeded", "Failed") for name in names)

        api.kubectl(
            "create", document=[quick("suspended", suspend=True), quick("lacking", devices={"products": ["none"]})]
        )
        until("a first status", 60, lambda: statuses()["lacking"].get("waiting"))
        time.sleep(max(JOBS.values()))
        huge = {"gpt": SIZES | {"layers": 400, "hiddenSize": 16384}}
        wave = [quick("good-1"), quick("good-2"), quick("memory", fault="candidate-2=crash"), quick("huge", model=huge)]
        api.kubectl("create", document=wave)
        # Events of new series are shown after this time; a kill before would lose them.
        shown = time.time() + UNSEEN_SECONDS
        until("the first wave", 400, answered("good-1", "good-2", "memory", "huge"))
        time.sleep(max(shown - time.time(), 0) + max(JOBS.values()) + 2)
        watching = {"replan": "OnClusterChange", "settlingSeconds": 3600}
        api.kubectl("create", document=[quick("later-1", **watching), quick("later-2", fault="candidate-1=crash")])
        until("the second wave", 60, lambda: statuses()["later-2"].get("phase") == "MeasuringLinks")
        killed = time.time()
        leader.process.kill()
        until("the second wave", 400, answered("later-1", "later-2"))
        everything = statuses()
        api.kubectl("cordon", everything["later-1"]["cluster"]["nodes"][0]["name"])
        until("a change of the nodes", 120, lambda: "change" in statuses()["later-1"]["cluster"])
        api.kubectl("delete", "trainingplan", "good-2", "--namespace", NAMESPACE)
        time.sleep(max(killed + UNSEEN_SECONDS - time.time(), 0) + max(JOBS.values()) + 5)
        existing = statuses()
        yield Story(server, {**everything, **existing}, existing, started, killed, time.time())


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def stage(status: Status) -> tuple[str, str]:
    """Return the phase and the reason of a status."""
    conditions = {one["type"]: one for one in status["conditions"]}
    if status["phase"] in ("Succeeded", "Failed", "Suspended"):
        return status["phase"], conditions["Suspended" if status["phase"] == "Suspended" else "Succeeded"]["reason"]
    present = next(kind for kind in CONDITIONS if conditions[kind]["status"] != "True")
    return PRINTED[present], conditions[present]["reason"]


def phase_since(status: Status) -> float:
    """Return since when a plan is in its phase."""
    conditions = {one["type"]: one for one in status["conditions"]}
    present = next(index for index, kind in enumerate(CONDITIONS) if conditions[kind]["status"] != "True")
    return max(at(conditions[kind]["lastTransitionTime"]) for kind in CONDITIONS[: present + 1])


def phase_seconds(status: Status) -> dict[str, float]:
    """Return how long each phase took that succeeded, with its waits."""
    seconds, since = {}, at(status["created"])
    for condition in (one for kind in CONDITIONS for one in status["conditions"] if one["type"] == kind):
        if condition["status"] != "True" or condition["type"] == "Succeeded":
            break
        ended = at(condition["lastTransitionTime"])
        seconds[PRINTED[condition["type"]]], since = ended - since, ended
    return seconds


def counted(keys: Iterable[str]) -> Values:
    return dict(Counter(keys))


def bucket(ratios: Iterable[float], edge: float) -> int:
    return sum(ratio <= edge for ratio in ratios)


def within(ratios: list[float], low: float, high: float) -> Values:
    return {"": (bucket(ratios, high) - bucket(ratios, low)) / len(ratios)}


def quantile(share: float, ratios: list[float], edges: Iterable[float]) -> float:
    """Return the quantile as `histogram_quantile` estimates it."""
    rank, low, before = share * len(ratios), 0.0, 0
    for edge in edges:
        if bucket(ratios, edge) >= rank:
            return low + (edge - low) * (rank - before) / (bucket(ratios, edge) - before)
        low, before = edge, bucket(ratios, edge)
    return low


def right_numbers(story: Story) -> dict[Query, tuple[tuple[str, ...], Values]]:
    """Return the labels and values of each panel's queries, by the statuses alone."""
    everything, existing, now = story.statuses, story.existing, story.ended
    finished = {name: one for name, one in everything.items() if one["phase"] in ("Succeeded", "Failed")}
    trials = [trial for one in everything.values() for trial in one.get("trials", [])]
    measured = [trial for trial in trials if trial["state"] == "Succeeded"]
    times = [trial["predictedSeconds"] / trial["measuredSeconds"] for trial in measured]
    memory = [trial["predictedPeakMemoryBytes"] / trial["peakMemoryBytes"] for trial in measured]
    lost = [trial for trial in trials if trial.get("reason") == "OutOfMemory"]
    memory += [0.0] * len(lost)
    answers = [one["winner"]["speedupOverBaseline"] for one in everything.values() if one.get("winner")]
    winners = {name: one for name, one in existing.items() if one.get("winner")}
    waiting = {name: one for name, one in existing.items() if one.get("waiting", {}).get("since")}
    spent = [part for one in everything.values() for part in one.get("deviceSeconds", [])]
    excluded = {
        (node["name"], node["code"])
        for one in existing.values()
        for node in one.get("cluster", {}).get("excludedNodes", [])
    }
    plan_labels = ("plan_namespace", "name")

    def tried(one: Status) -> dict[str, Any]:
        return {trial["name"]: trial for trial in one["trials"]}

    def of_winners(value: Callable[[Status], float]) -> tuple[tuple[str, ...], Values]:
        return plan_labels, {f"{NAMESPACE},{name}": value(one) for name, one in winners.items()}

    def regret(one: Status) -> float:
        first = next(
            (
                t
                for t in one["trials"]
                if t["role"] == "Candidate" and t["predictedRank"] == 1 and t.get("measuredSeconds")
            ),
            None,
        )
        return first["measuredSeconds"] / one["winner"]["measuredSeconds"] - 1 if first else float("nan")

    def saved(one: Status) -> float:
        winner = one["winner"]
        seconds = winner["measuredSeconds"] * winner["speedupOverBaseline"]
        baseline = min(
            (t for t in one["trials"] if t.get("measuredSeconds")), key=lambda t: abs(t["measuredSeconds"] - seconds)
        )
        return float(seconds * baseline["devices"] - winner["measuredSeconds"] * tried(one)[winner["trial"]]["devices"])

    def used(one: Status) -> float:
        return sum(part.get(result, 0.0) for part in one["deviceSeconds"] for result in ("succeeded", "failed", "lost"))

    def has_competed(one: Status) -> bool:
        candidates = [t for t in one["trials"] if t["role"] == "Candidate" and t.get("measuredSeconds")]
        return len(candidates) > 1 or one["winner"]["trial"] not in {t["name"] for t in candidates}

    competed = {name: one for name, one in winners.items() if has_competed(one)}
    regrets = {name: regret(one) for name, one in competed.items() if regret(one) == regret(one)}
    payback = {name: used(one) / saved(one) for name, one in winners.items() if saved(one) > 0}
    results = counted(f"{one['phase'].lower()},{stage(one)[1]}" for one in finished.values())
    hours = Counter[str]()
    for part in spent:
        hours[part["purpose"].lower()] += (part.get("succeeded", 0.0) + part.get("failed", 0.0)) / 3600
    nothing: Values = {}
    plain: tuple[str, ...] = ()
    return {
        ("Operator", "A"): (plain, {"": 1}),
        ("Failed", "A"): (plain, {"": sum(one["phase"] == "Failed" for one in existing.values())}),
        ("Suspended", "A"): (plain, {"": sum(one["phase"] == "Suspended" for one in existing.values())}),
        ("Waiting", "A"): (plain, {"": len(waiting)}),
        ("Plans under way", "A"): (("phase", "reason"), counted(",".join(stage(one)) for one in existing.values() if one["phase"] not in ("Succeeded", "Failed"))),
        ("Finished plans that exist", "A"): (("phase", "reason"), counted(",".join(stage(one)) for one in existing.values() if one["phase"] in ("Succeeded", "Failed"))),
        ("Where each plan is", "A"): (("name", "phase"), {f"{name},{one['phase']}": now - phase_since(one) for name, one in existing.items() if one["phase"] not in ("Succeeded", "Failed", "Suspended")}),
        ("Version", "A"): (("version",), {version("trainwright"): 1}),
        ("Winners", "A"): of_winners(lambda one: 1),
        ("Where each plan is", "B"): ((*plan_labels, "reason"), {f"{NAMESPACE},{name},{one['waiting']['reason']}": now - at(one["waiting"]["since"]) for name, one in waiting.items()}),
        ("Where each plan is", "C"): (plan_labels, {f"{NAMESPACE},{name}": one["waiting"].get("earlierSeconds", 0) for name, one in waiting.items()}),
        ("Plans that finished", "A"): (("result", "reason"), results),
        ("Finished plans", "A"): (("result", "reason"), results),
        ("Trials", "A"): (("result", "reason"), counted(f"{t['state'].lower()},{t['reason']}" for t in trials)),
        ("Searches", "A"): (("state",), {"running": 0, "waiting": 0}),
        ("Times that were predicted well", "A"): (plain, within(times, 0.95, 1.05)),
        ("Times that were predicted well", "B"): (plain, within(times, 0.9, 1.1)),
        ("Times that were predicted well", "C"): (plain, within(times, 0.8, 1.2)),
        ("Memory that was predicted well", "A"): (plain, within(memory, 0.95, 1.05)),
        ("Memory that was predicted well", "B"): (plain, within(memory, 0.9, 1.1)),
        ("Memory that was predicted well", "C"): (plain, within(memory, 0.8, 1.2)),
        ("Out of memory", "A"): (plain, {"": len(lost)}),
        ("Predicted over measured time, by accelerator", "A"): (("accelerator",), {"emulated-v100": quantile(0.5, times, RATIO_BUCKETS)}),
        ("Predicted over measured time, by family", "A"): (("family",), {"gpt": quantile(0.5, times, RATIO_BUCKETS)}),
        ("Predicted over measured time, by planner", "A"): (("planner",), {"Amp": quantile(0.5, times, RATIO_BUCKETS)}),
        ("Speed-up over the heuristic", "A"): (plain, {"": quantile(0.5, answers, SPEEDUP_BUCKETS)}),
        ("Speed-up over the heuristic", "B"): (plain, {"": quantile(0.9, answers, SPEEDUP_BUCKETS)}),
        ("Regret of the first prediction", "A"): (plain, {"": sum(regrets.values()) / len(regrets)} if regrets else nothing),
        ("Regret of the first prediction", "B"): (plain, {"": max(regrets.values())} if regrets else nothing),
        ("Winners by predicted rank", "A"): (("rank",), counted(str(one["winner"]["predictedRank"]) for one in competed.values())),
        ("Device-hours spent", "A"): (("purpose",), {name: hours[name] for name in ("links", "profiles", "trials")}),
        ("Device-hours spent", "B"): (plain, {"": sum(part.get("lost", 0.0) for part in spent) / 3600}),
        ("Iterations until measuring is paid back", "A"): (plain, {"": statistics.median(payback.values())}),
        ("Age of profiles", "A"): (("accelerator",), {"emulated-v100": now - max(at(one["profilesMeasuredAt"]) for one in existing.values() if one.get("profilesMeasuredAt"))}),
        ("Outdated plans, by cause", "A"): (("cause",), {"nodes": sum("change" in one.get("cluster", {}) for one in existing.values())}),
        ("Nodes left out, by reason", "A"): (("reason",), counted(code for _, code in excluded)),
        ("Slow nodes", "A"): (plain, {"": 0}),
        ("Measurements refuted", "A"): (plain, {"": 0}),
        ("Winners", "B"): of_winners(lambda one: one["winner"]["speedupOverBaseline"]),
        ("Winners", "C"): of_winners(lambda one: one["winner"]["measuredSeconds"]),
        ("Winners", "D"): of_winners(lambda one: one["winner"]["predictedSeconds"]),
        ("Winners", "E"): (plan_labels, {f"{NAMESPACE},{name}": one["winner"]["predictedRank"] for name, one in competed.items()}),
        ("Winners", "F"): (plan_labels, {f"{NAMESPACE},{name}": value for name, value in regrets.items()}),
        ("Winners", "G"): of_winners(lambda one: tried(one)[one["winner"]["trial"]]["devices"]),
        ("Winners", "H"): (plan_labels, {f"{NAMESPACE},{name}": one["winner"]["modelFlopUtilisation"] for name, one in winners.items() if "modelFlopUtilisation" in one["winner"]}),
        ("Winners", "I"): of_winners(lambda one: one["winner"]["pricePerSample"]),
        ("Winners", "J"): of_winners(saved),
        ("Winners", "K"): (plan_labels, {f"{NAMESPACE},{name}": value for name, value in payback.items()}),
        ("Winners", "L"): of_winners(lambda one: one["links"]["collectiveError"]),
    }  # fmt: skip


COUNTS = {"Plans that finished", "Finished plans", "Trials", "Out of memory", "Device-hours spent"}
SHARES = {
    "Times that were predicted well", "Memory that was predicted well", "Predicted over measured time, by accelerator",
    "Predicted over measured time, by family", "Predicted over measured time, by planner", "Speed-up over the heuristic",
}  # fmt: skip
OF_THE_CLOCK = {"Where each plan is", "Age of profiles"}
HAS_DATA = {
    ("Passes over plans", "A"), ("Passes over plans", "B"), ("How long a pass takes", "A"), ("How long a pass takes", "B"),
    ("How long a pass waits for its turn", "A"), ("How long a pass waits for its turn", "B"),
}  # fmt: skip
"""Queries whose numbers depend on this machine, and no status has: that they have data is tested."""


def bounds(story: Story) -> dict[Query, tuple[tuple[str, ...], Values, Values]]:
    """Return the labels, least and most values of queries whose waits a status tells only all together, or by what it read last."""
    waits = {name: one.get("waiting", {}).get("earlierSeconds", 0) for name, one in story.statuses.items()}
    least, most = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for name, one in story.statuses.items():
        for phase, seconds in phase_seconds(one).items():
            most[phase].append(seconds)
            least[phase].append(max(seconds - waits[name], 0.0))
    close = 0.1  # the share that `increase` may lose or add of the events of one of two operators

    def of_phases(seconds: Mapping[str, list[float]], share: float) -> Values:
        return {phase: quantile(share, values, PHASE_BUCKETS) for phase, values in seconds.items()}

    quantiles = {
        ("How long phases take", letter): (("phase",), of_phases(least, share - close), of_phases(most, share + close))
        for letter, share in (("A", 0.5), ("B", 0.9))
    }
    # Nothing wakes the operator for a minute but its listing of all plans.
    return {**quantiles, ("Without an answer from the API server", "A"): ((), {"": 0.0}, {"": 95.0})}


ROUNDING = 2e-4
"""Figures of a status have five digits."""


def extrapolated(seconds: int, story: Story) -> float:
    """Return by which share `increase` may exceed the truth: a series that ended goes on for half a scrape interval."""
    return 0.03 + 0.5 * seconds / (story.killed - story.started) + seconds / (story.ended - story.killed)


@pytest.mark.parametrize("job", JOBS)
def test_panels_show_what_the_statuses_say(story: Story, job: str) -> None:
    queries = panel_queries("1h", release=job)
    expected = right_numbers(story)
    between = bounds(story)
    waits = ("Waits", "A")
    assert queries.keys() == expected.keys() | between.keys() | HAS_DATA | {waits}
    wrong = {}
    for query, expression in queries.items():
        title, _ = query
        if query == waits:  # a status tells those of all reasons together
            hours = sum(one.get("waiting", {}).get("earlierSeconds", 0) for one in story.statuses.values()) / 3600
            (shown_hours,) = story.prometheus.values(f"sum({expression})", at=story.ended).values()
            if shown_hours != pytest.approx(hours, rel=extrapolated(JOBS[job], story), abs=1e-6):
                wrong[query] = f"shown {shown_hours}, right {hours}"
            continue
        if query in between:
            labels, least, most = between[query]
            shown = story.prometheus.values(expression, *labels, at=story.ended)
            if shown.keys() != most.keys() or not all(least[key] <= shown[key] <= most[key] for key in most):
                wrong[query] = f"shown {shown}, at least {least}, at most {most}"
            continue
        if query in HAS_DATA:
            if not story.prometheus.query(expression, at=story.ended):
                wrong[query] = "no data"
            continue
        labels, values = expected[query]
        shown = story.prometheus.values(expression, *labels, at=story.ended)
        share = extrapolated(JOBS[job], story) if title in COUNTS | SHARES else ROUNDING
        tolerance = 2.0 if title in OF_THE_CLOCK else 1e-6
        near = pytest.approx(values, rel=share, abs=tolerance)
        if shown != near:
            wrong[query] = f"shown {shown}, right {dict(values)}"
    assert not wrong, "\n".join(f"{query}: {what}" for query, what in wrong.items())


ANSWERS: Mapping[str, tuple[str, Query]] = {
    'bucket{kind="time",le="1.2"}': ("accelerator", ("Predicted within 20 %, by accelerator", "A")),
    "0.5, sum by (le, accelerator)": ("accelerator", ("Predicted over measured time, by accelerator", "A")),
    'reason="OutOfMemory"': ("", ("Out of memory", "A")),
    "avg(max by (plan_namespace, name) (trainwright_plan_regret_ratio))": ("", ("Regret of the first prediction", "A")),
    "group_left (family, accelerators": ("plan_namespace,name", ("Winners", "B")),
    "0.5, sum by (le, planner)": ("planner", ("Speed-up, by planner", "A")),
    "trainwright_device_seconds_total": ("purpose", ("Device-hours, by purpose", "A")),
    "trainwright_plan_payback_iterations": ("plan_namespace,name", ("Winners", "K")),
    "trainwright_plans_finished_total": ("result,reason", ("Plans that finished", "A")),
    "trainwright_plan_waiting_since": ("plan_namespace,name,reason", ("Waits of plans", "A")),
    "trainwright_plan_model_flop_utilisation_ratio": ("plan_namespace,name", ("Winners", "H")),
    "trainwright_profile_timestamp_seconds": ("accelerator", ("Age of profiles", "A")),
}
"""Part of each query of the page whose numbers are compared: its labels, and the right numbers."""


def answers_of(story: Story) -> dict[Query, Values]:
    """Return the right numbers of the panels, and of what the page alone asks."""
    panels = {query: values for query, (_, values) in right_numbers(story).items()}
    good = panels["Times that were predicted well", "C"][""]
    spent = panels["Device-hours spent", "A"]
    waits = panels["Where each plan is", "B"]
    earlier = panels["Where each plan is", "C"]
    return panels | {
        ("Predicted within 20 %, by accelerator", "A"): {"emulated-v100": good},
        ("Speed-up, by planner", "A"): {"Amp": panels["Speed-up over the heuristic", "A"][""]},
        ("Device-hours, by purpose", "A"): {**spent, "trials": spent["trials"] + panels["Device-hours spent", "B"][""]},
        ("Waits of plans", "A"): {key: seconds + earlier[key.rpartition(",")[0]] for key, seconds in waits.items()},
    }


def of_job(expression: str, job: str) -> str:
    """Return the expression on the series of one scrape job."""
    selected = re.sub(r"(trainwright_\w+)(?![\w{])", r"\1{}", expression)
    return re.sub(r"(trainwright_\w+)\{", rf'\1{{job="{job}",', selected).replace(",}", "}")


@pytest.mark.parametrize("job", JOBS)
def test_questions_of_the_page_have_the_right_answers(story: Story, job: str) -> None:
    right, queries = answers_of(story), page_queries()
    for expression in queries:
        if "trainwright_node_speed_ratio" in expression:
            continue  # of real devices
        assert story.prometheus.query(of_job(expression, job), at=story.ended), expression
    for part, (labels, query) in ANSWERS.items():
        (expression,) = (one for one in queries if part in one)
        expected = right[query]
        shown = story.prometheus.values(of_job(expression, job), *filter(None, labels.split(",")), at=story.ended)
        is_of_counters = "increase" in expression
        share = extrapolated(JOBS[job], story) if is_of_counters else ROUNDING
        tolerance = 2.0 if "time()" in expression else 1e-6
        assert shown == pytest.approx(expected, rel=share, abs=tolerance), expression


def test_alerts_fire_for_what_happened_and_for_nothing_else(story: Story) -> None:
    server, span = story.prometheus, f"{round(story.ended - story.started)}s"
    fired = server.values(f'max_over_time(ALERTS{{alertstate="firing"}}[{span}])', "alertname", at=story.ended)
    trials = [
        trial for one in story.statuses.values() for trial in one.get("trials", []) if trial["state"] == "Succeeded"
    ]
    good = within([trial["predictedSeconds"] / trial["measuredSeconds"] for trial in trials], 0.8, 1.2)[""]
    # All plans take longer than the hurried thresholds, and nobody held the lease for a while after the kill.
    expected = {"TrainwrightPlanLacks", "TrainwrightNoOperator", "TrainwrightPlanStuck"}
    expected |= {"TrainwrightPredictionsAreOff"} if good < 0.5 and len(trials) >= 10 else set()
    # Plans may choose the same nodes at once; a wait for each other is seen until the next scrape, beyond the hurried threshold.
    waits = [one.get("waiting", {}).get("earlierSeconds", 0) for one in story.statuses.values()]
    possible = {"TrainwrightPlanWaitsForCapacity"} if any(waits) else set()
    assert expected <= fired.keys() <= expected | possible
    alerts = {rule["alert"]: rule["expr"] for rule in hurried_rules()["groups"][0]["rules"]}
    lacks = server.values(alerts["TrainwrightPlanLacks"], "plan_namespace", "reason", at=story.ended)
    assert lacks == {f"{NAMESPACE},{story.existing['lacking']['waiting']['reason']}": 1}
    off = server.values(alerts["TrainwrightPredictionsAreOff"], "job", "accelerator", at=story.ended)
    assert off == pytest.approx({f"{name},emulated-v100": 1 - good for name in JOBS}, rel=0.03)
    assert not server.query(alerts["TrainwrightNoOperator"], at=story.ended)
