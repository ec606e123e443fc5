"""Tasks for small gangs, and their execution on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from warm_worker import WarmWorker

from trainwright import documents
from trainwright.cluster import Device
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import (
    FAILURE_MARKER,
    PROGRESS_MARKER,
    REPORT_MARKER,
    SERIES_PART_MARKER,
    Failure,
    Gang,
    GangNode,
    LinkReport,
    ProfilingReport,
    Progress,
    SeriesPart,
    TrialReport,
    TrialSeriesReport,
    TrialTask,
    WorkerTask,
)
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.gang.rank_assignment import gang_devices

SMALL = Gpt(layers=2, hidden_size=32, heads=4, sequence_length=16, vocabulary_size=64)


@dataclass
class Outcome:
    """Exit code, reports, failures and output of a gang."""

    code: int
    reports: list = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    parts: list[SeriesPart] = field(default_factory=list)
    errors: str = ""

    @classmethod
    def of(cls, code: int, output: str, errors: str) -> Outcome:
        outcome = cls(code, errors=errors)
        for line in output.splitlines():
            marker, _, body = line.partition(" ")
            if marker == REPORT_MARKER:
                outcome.reports.append(
                    documents.loads(body, TrialReport | TrialSeriesReport | ProfilingReport | LinkReport)
                )
            elif marker == SERIES_PART_MARKER:
                outcome.parts.append(documents.loads(body, SeriesPart))
            elif marker == FAILURE_MARKER:
                outcome.failures.append(documents.parse(json.loads(body), Failure))
            elif marker == PROGRESS_MARKER:
                outcome.progress.append(documents.parse(json.loads(body), Progress))
        return outcome

    @property
    def reasons(self) -> set[str]:
        return {str(failure.reason) for failure in self.failures}


TESTS = Path(__file__).parents[1]
IMPORTABLE = (TESTS.parent / "planner", TESTS.parent / "profiler-image", TESTS / "worker" / "oracles")
"""This checkout's code, whichever one is installed, and the entry points of user models."""
BARE = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(map(str, IMPORTABLE))}
"""Environment of a worker, without what this process was given."""
LONGEST_SECONDS = 110


class Worker:
    """Runner of worker commands on tasks in files."""

    def __init__(self, folder: Path, warm: WarmWorker) -> None:
        self.folder = folder
        self.warm = warm

    def start(
        self,
        order: WorkerTask | str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ):
        command = [*prefix, sys.executable, "-m", "trainwright_worker", *arguments, "--order", self._write(order)]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**BARE, "HOME": str(self.folder), **(environment or {})},
        )

    def local(self, order: WorkerTask | str, prefix: tuple[str, ...] = ()) -> Outcome:
        """Run the gang on this machine, by a command that `prefix` begins; without one, forked from a warm process."""
        if prefix:
            return self.end(self.start(order, "local", prefix=prefix))
        arguments = ("local", "--order", self._write(order))
        return Outcome.of(*self.warm.run(self.folder, *arguments, timeout_seconds=LONGEST_SECONDS))

    def _write(self, order: WorkerTask | str) -> str:
        path = self.folder / "order.json"
        path.write_text(order if isinstance(order, str) else documents.dumps(order), encoding="utf-8")
        return str(path)

    def end(self, process: subprocess.Popen[str]) -> Outcome:
        try:
            output, errors = process.communicate(timeout=LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Outcome.of(process.returncode, output, errors)


@pytest.fixture(scope="session")
def warm_worker() -> Iterator[WarmWorker]:
    warm = WarmWorker(BARE)
    yield warm
    warm.close()


@pytest.fixture
def worker(tmp_path: Path, warm_worker: WarmWorker) -> Worker:
    return Worker(tmp_path, warm_worker)


class Make:
    """Factory of parts of small tasks."""

    gpt = SMALL
    model = Model.of(SMALL)

    def gang(self, *devices: int, **fields) -> Gang:
        """Return a gang of nodes node-a, node-b, … with the given numbers of devices."""
        nodes = tuple(GangNode(f"node-{chr(ord('a') + i)}", tuple(range(n)), "cpu") for i, n in enumerate(devices))
        return Gang(nodes, **{"collective_timeout_seconds": 60.0, "deadline_seconds": 100.0, **fields})

    def plan(self, devices: tuple[Device, ...], data: int = 1, tensor: int = 1) -> Plan:
        """Return a uniform plan: as many stages as the devices allow, two micro-batches of four rows."""
        layers, size = SMALL.layers + 2, data * tensor
        count = len(devices) // size
        cuts = [round(stage * layers / count) for stage in range(count + 1)]
        rows = tuple(4 // data + (replica < 4 % data) for replica in range(data))
        stages = tuple(
            Stage(
                devices[stage * size : (stage + 1) * size],
                (LayerRun(cuts[stage], cuts[stage + 1] - cuts[stage], Strategy(tensor, data), rows),),
            )
            for stage in range(count)
        )
        return Plan(layers, 8, (Pipeline(2, 4, stages),))

    def trial(self, gang: Gang, data: int = 1, tensor: int = 1, **fields) -> TrialTask:
        plan = self.plan(gang_devices(gang), data, tensor)
        return TrialTask(gang, self.model, plan, **{"warmup_iterations": 1, "iterations": 3, **fields})


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()


@pytest.fixture
def executor() -> Iterator[Callable[..., PlanExecutor]]:
    """Return a factory of executors of any rank, of plans of one stage on two ranks, whose collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    groups = ProcessGroups(timedelta(seconds=10))

    def of(
        model: Model,
        rank: int = 0,
        *,
        data: int = 1,
        tensor: int = 1,
        recompute: bool = False,
        optimizer: str = "sgd",
        **fields,
    ) -> PlanExecutor:
        torch.manual_seed(0)  # every process starts with the same generator
        layers, devices = len(model.layers), tuple(Device("node", slot) for slot in range(data * tensor))
        run = LayerRun(0, layers, Strategy(tensor, data, recompute=recompute), (4 // data,) * data)
        plan = Plan(layers, 8, (Pipeline(2, 4, (Stage(devices, (run,)),)),), **fields)
        return PlanExecutor(plan, model, TrainingConfig(optimizer, 0.1), RankContext(rank, torch.device("cpu")), groups)

    yield of
    dist.destroy_process_group()
