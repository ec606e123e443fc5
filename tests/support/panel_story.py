"""Run of real operators over plans of a real API server, whose metrics a real Prometheus scrapes at two intervals.

A leader and a standby work through a wave of trials, a kill amid another, a failover, a change of nodes and a deletion. Kubelets and
workers are simulated.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from flow_reports import report_of
from operator_process import until
from prometheus import FILES, Prometheus, prometheus
from simulated_nodes import simulated_nodes
from soak_cluster import NAMESPACE, cluster, node, operator, plan

from trainwright.worker_api import Failure, FailureReason, TrialTask, WorkerTask
from trainwright_operator.kube.main import UNSEEN_SECONDS

JOBS = {"every-5": 5, "every-30": 30}


def run_seconds(gang: str) -> float:
    """Return for how long a gang runs: links, like all trials of a plan, longer than both scrape intervals.

    So the series in which they count were seen at 0.
    """
    return 33.0 if gang == "links" else 11.0


SIZES = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
Status = Mapping[str, Any]


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
