"""Profiles and trials by the worker's own command, and predictions from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpu_checks.hardware import Hardware
from trainwright import documents
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import Estimate, estimate
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import ProcessBytes, Runtime
from trainwright.training import Optimizer
from trainwright.worker_api import (
    FAILURE_MARKER,
    REPORT_MARKER,
    Failure,
    FailureReason,
    Gang,
    GangNode,
    ProfilingReport,
    ProfilingTask,
    WorkerReport,
    WorkerTask,
)

NODE = "here"
DEADLINE_SECONDS, MAX_DEADLINE_SECONDS = 240.0, 1200.0
SECONDS_OF_A_PROFILE = 4.0
"""Upper estimate for one kind of layer at one number of rows."""
NETWORK = Port(1e-5, 25e9)
INSIDE = Port(5e-6, 100e9)
"""Links of predictions in which none matters, or none was measured."""


def ended(process: subprocess.Popen[str]) -> tuple[WorkerReport | None, list[Failure]]:
    """Wait for a worker's command. Returns its report, if it succeeded, and the failures that it told of otherwise."""
    output, errors = process.communicate(timeout=MAX_DEADLINE_SECONDS + 60)
    said = [line.split(" ", 1) for line in output.splitlines() if " " in line]
    reports = [body for marker, body in said if marker == REPORT_MARKER]
    if process.returncode == 0 and reports:
        return documents.loads(reports[-1], WorkerReport), []
    failures = [documents.parse(json.loads(body), Failure) for marker, body in said if marker == FAILURE_MARKER]
    return None, failures or [Failure(FailureReason.CRASHED, errors[-300:])]


@dataclass(frozen=True, slots=True)
class WorkerCommands:
    """Commands of the worker on this machine's devices."""

    hardware: Hardware

    def gang(self, devices: int = 1) -> Gang:
        """Return a gang of one node."""
        node = GangNode(NODE, tuple(range(devices)), self.hardware.name)
        return Gang((node,), backend=self.hardware.backend, deadline_seconds=DEADLINE_SECONDS)

    def report_of(self, task: WorkerTask) -> WorkerReport:
        """Run a whole gang on this machine. Raises RuntimeError with the worker's own sentence if it fails."""
        report, failures = ended(self.start(task, "local"))
        if report is None:
            raise RuntimeError(failures[-1].message)
        return report

    def start(self, task: WorkerTask, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start `python -m trainwright_worker` in a process group of its own."""
        path = self.hardware.folder / "order.json"
        path.write_text(documents.dumps(task), encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-m", "trainwright_worker", *arguments, "--order", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            process_group=0,
        )

    def profile(
        self, model: Model, rows: Mapping[int, Iterable[int]], *, seconds_per_layer: float = 1.0
    ) -> tuple[Profiles, Runtime]:
        """Return the measured layers at the rows of each tensor degree, and what a process holds besides tensors."""
        layers: list[LayerProfile] = []
        held = 0
        for degree, counts in rows.items():
            ordered = tuple(sorted(set(counts)))
            wanted = SECONDS_OF_A_PROFILE * len(model.kinds) * len(ordered)
            gang = replace(self.gang(), deadline_seconds=min(max(wanted, DEADLINE_SECONDS), MAX_DEADLINE_SECONDS))
            task = ProfilingTask(gang, model, degree, ordered, seconds_per_layer=seconds_per_layer)
            if self.hardware.small:
                task = replace(task, warmup_iterations=1, iterations=2, seconds_per_layer=0.0)
            report = self.report_of(task)
            if not isinstance(report, ProfilingReport):
                raise TypeError(f"the worker answered a profile order with a {report.kind} report")
            layers += report.layers
            held = max(held, report.process_bytes or 0)
        return Profiles(tuple(layers)), Runtime(process_bytes=(ProcessBytes(self.hardware.name, held),))

    def predict(  # noqa: PLR0913 - what an estimate depends on
        self,
        plan: Plan,
        model: Model,
        profiles: Profiles,
        runtime: Runtime,
        inside: Port = INSIDE,
        *,
        optimizer: Optimizer = "adam",
    ) -> Estimate:
        """Return the planner's estimate of a plan whose devices are all like this one."""
        slots: dict[str, int] = {}
        for device in plan.devices:
            slots[device.node] = max(slots.get(device.node, 0), device.slot + 1)
        name = self.hardware.name
        nodes = tuple(Node(node, name, count, NETWORK, inside) for node, count in slots.items())
        cluster = Cluster((Accelerator(name, self.hardware.memory_bytes),), nodes)
        return estimate(plan, model=model, cluster=cluster, profiles=profiles, optimizer=optimizer, runtime=runtime)
