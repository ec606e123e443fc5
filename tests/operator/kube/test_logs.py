"""Log tails: they reach back to the first part of a series, however long its trials are."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from flow_api import Lists
from flow_reports import parts_of
from flow_world import World

from trainwright import documents
from trainwright.cluster import Device
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import Gang, GangNode, TrialReport, TrialSeriesTask, TrialTask
from trainwright_operator.flow.gangs import worker_log
from trainwright_operator.kube.client import Api
from trainwright_operator.kube.snapshot_reader import ReadCache, SnapshotReader
from trainwright_operator.settings import Settings
from trainwright_worker.gang import report_writer

MODEL = Model.of(Gpt(2, 32, 4, 16, 64))
PLAN = Plan(4, 8, (Pipeline(2, 4, (Stage((Device("n1", 0),), (LayerRun(0, 4, Strategy(1, 1), (4,)),)),)),))
GANG = Gang((GangNode("n1", (0,), "t4"),))
MANY = 500
PLAN_UID = World().snapshot().plan.uid
MASTER = {f"training.kubeflow.org/{key}": value for key, value in (("job-name", "p"), ("replica-index", "0"))}
CREATED = {"creationTimestamp": "2026-01-01T00:00:00Z"}
OWNED = {"ownerReferences": [{"kind": "PyTorchJob", "name": "p", "uid": "uid-p"}]}


class Kubelet(Lists):
    """API server for a namespace with one pod, whose log it returns like a kubelet."""

    def __init__(self, order: TrialSeriesTask | TrialTask, phase: str, log: str) -> None:
        gang = {"trainwright.dev/gang": "candidate-1s"}
        labels = {**gang, "trainwright.dev/rendezvous": "true", **MASTER}
        pod = {
            "metadata": {"name": "master-0", "labels": labels, **CREATED, **OWNED},
            "spec": {},
            "status": {"phase": phase},
        }
        gang |= {"trainwright.dev/role": "order", "trainwright.dev/plan-uid": PLAN_UID}
        order_map = {
            "metadata": {"name": "order", "labels": gang, **CREATED, "ownerReferences": [{"uid": PLAN_UID}]},
            "data": {"order.json": documents.dumps(order)},
        }
        self.items = {"pods": [pod], "configmaps": [order_map]}
        self.log = log

    async def list(self, path: str, **_query: str) -> list[dict[str, Any]]:
        return self.items.get(path.rpartition("/")[2], [])

    async def get_text(self, _path: str, *, container: str, tailLines: str, limitBytes: str) -> str:  # noqa: N803
        lines = self.log.splitlines(keepends=True)[-int(tailLines) :]
        return "".join(lines)[: int(limitBytes)]


def read(order: TrialSeriesTask | TrialTask, phase: str, log: str) -> str:
    """Return what the operator reads of a log."""
    observer = SnapshotReader(cast("Api", Kubelet(order, phase, log)), Settings())
    snapshot = World().snapshot()
    (pod,) = asyncio.run(observer.snapshot(snapshot.plan, ReadCache(), snapshot.planner)).pods
    assert pod.log is not None
    return pod.log


def told_by_worker(capfd: Any, iterations: int) -> str:
    """Return a trial's lines of progress."""
    capfd.readouterr()
    for number in range(iterations):
        report_writer.write_progress(number + 1, iterations, "iterations")
    return capfd.readouterr().out


@pytest.mark.parametrize("phase", ["Running", "Failed"])
@pytest.mark.parametrize("trials", [3, 32])
def test_all_series_parts_are_read_when_the_series_is_interrupted(capfd: Any, phase: str, trials: int) -> None:
    progress = told_by_worker(capfd, MANY)
    order = TrialSeriesTask(GANG, MODEL, (PLAN,) * trials, iterations=MANY)
    report = TrialReport((1.123456789012345,) * MANY, (0.123456789012345,) * MANY)
    parts = parts_of([report] * (trials - 1)).splitlines(keepends=True)
    log = "".join(progress + part for part in parts) + progress + "a traceback\n" * 100
    assert set(worker_log.parse_series_parts(read(order, phase, log))) == set(range(trials - 1))


def test_only_report_and_progress_are_read_of_other_gangs(capfd: Any) -> None:
    order = TrialTask(GANG, MODEL, PLAN)
    log = "a line\n" * 5000 + told_by_worker(capfd, 10)
    assert len(read(order, "Running", log).splitlines()) == 40
    assert len(read(order, "Succeeded", log).splitlines()) == 400
    assert worker_log.parse_progress(read(order, "Running", log)).done == 10


@pytest.mark.parametrize("broken", ["nonsense", "[1]", '{"kind": "other"}', ""])
def test_modified_task_is_not_a_series(broken: str) -> None:
    kubelet = Kubelet(TrialSeriesTask(GANG, MODEL, (PLAN,)), "Running", "a line\n" * 500)
    kubelet.items["configmaps"][0]["data"]["order.json"] = broken
    snapshot = World().snapshot()
    found = asyncio.run(
        SnapshotReader(cast("Api", kubelet), Settings()).snapshot(snapshot.plan, ReadCache(), snapshot.planner)
    )
    assert len((found.pods[0].log or "").splitlines()) == 40
