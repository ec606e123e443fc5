"""Right numbers of both dashboards' panels and of the page's queries, computed from the statuses of a story's plans."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib.metadata import version
from typing import Any

from panel_story import Status, Story
from prometheus import Query
from soak_cluster import NAMESPACE

from trainwright_operator.metrics.plan_events import _PHASE_BUCKETS as PHASE_BUCKETS
from trainwright_operator.metrics.plan_events import _RATIO_BUCKETS as RATIO_BUCKETS
from trainwright_operator.metrics.plan_events import _SPEEDUP_BUCKETS as SPEEDUP_BUCKETS

Values = Mapping[str, float]
CONDITIONS = ("Accepted", "NodesDiscovered", "LinksMeasured", "Profiled", "Planned", "TrialsCompleted", "Succeeded")
PRINTED = dict(
    zip(
        CONDITIONS,
        ("Pending", "Discovering", "MeasuringLinks", "Profiling", "Planning", "Trying", "Trying"),
        strict=True,
    )
)


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
