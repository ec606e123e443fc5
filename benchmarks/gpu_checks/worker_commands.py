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
from trainwright.worker_api import (
    FAILURE_MARKER,
    REPORT_MARKER,
    Gang,
    GangNode,
    ProfilingReport,
    ProfilingTask,
    WorkerReport,
    WorkerTask,
)

NODE = "here"
DEADLINE_SECONDS = 240.0
NETWORK = Port(1e-5, 25e9)
INSIDE = Port(5e-6, 100e9)
"""Links of predictions in which none matters, or none was measured."""


@dataclass(frozen=True, slots=True)
class WorkerCommands:
    """Commands of the worker on this machine's devices."""

    hardware: Hardware

    def gang(self, devices: int = 1) -> Gang:
        """Return a gang of one node."""
        node = GangNode(NODE, tuple(range(devices)), self.hardware.name)
        return Gang((node,), backend=self.hardware.backend, deadline_seconds=DEADLINE_SECONDS)

    def report_of(self, task: WorkerTask) -> WorkerReport:
        """Run `python -m trainwright_worker local`. Raises RuntimeError with the worker's own sentence if it fails."""
        path = self.hardware.folder / "order.json"
        path.write_text(documents.dumps(task), encoding="utf-8")
        command = [sys.executable, "-m", "trainwright_worker", "local", "--order", str(path)]
        run = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=DEADLINE_SECONDS + 60, env={**os.environ}
        )
        said = dict(line.split(" ", 1) for line in run.stdout.splitlines() if " " in line)
        if run.returncode == 0:
            report: WorkerReport = documents.loads(said[REPORT_MARKER], WorkerReport)
            return report
        failure = json.loads(said.get(FAILURE_MARKER, "{}"))
        raise RuntimeError(failure.get("message") or run.stderr[-300:])

    def profile(
        self, model: Model, rows: Mapping[int, Iterable[int]], *, seconds_per_layer: float = 1.0
    ) -> tuple[Profiles, Runtime]:
        """Return the measured layers at the rows of each tensor degree, and what a process holds besides tensors."""
        layers: list[LayerProfile] = []
        held = 0
        for degree, counts in rows.items():
            task = ProfilingTask(self.gang(), model, degree, tuple(sorted(counts)), seconds_per_layer=seconds_per_layer)
            if self.hardware.small:
                task = replace(task, warmup_iterations=1, iterations=2, seconds_per_layer=0.0)
            report = self.report_of(task)
            if not isinstance(report, ProfilingReport):
                raise TypeError(f"the worker answered a profile order with a {report.kind} report")
            layers += report.layers
            held = max(held, report.process_bytes or 0)
        return Profiles(tuple(layers)), Runtime(process_bytes=(ProcessBytes(self.hardware.name, held),))

    def predict(
        self, plan: Plan, model: Model, profiles: Profiles, runtime: Runtime, inside: Port = INSIDE
    ) -> Estimate:
        """Return the planner's estimate of a plan whose devices are all like this one."""
        slots: dict[str, int] = {}
        for device in plan.devices:
            slots[device.node] = max(slots.get(device.node, 0), device.slot + 1)
        name = self.hardware.name
        nodes = tuple(Node(node, name, count, NETWORK, inside) for node, count in slots.items())
        cluster = Cluster((Accelerator(name, self.hardware.memory_bytes),), nodes)
        return estimate(plan, model=model, cluster=cluster, profiles=profiles, runtime=runtime)
