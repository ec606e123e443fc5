"""NCCL between processes that share one GPU, each on a node of its own: plans, links, and what a lost process does.

NCCL refuses two processes of one machine on a GPU. Under names of different machines (NCCL_HOSTID) it joins them through
sockets on the loopback, so that groups, order of calls and errors are NCCL's, though not its speed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from gpu_checks.findings import Finding, judged, skipped
from gpu_checks.gang_memory import findings_of_pipelines
from gpu_checks.hardware import Hardware
from gpu_checks.plan_gangs import PROCESSES, gang_subjects
from gpu_checks.running import Subject
from gpu_checks.whole_trials import uniform_plan
from gpu_checks.worker_commands import WorkerCommands, ended
from trainwright.cluster import Device
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.strategy import Sharding
from trainwright.worker_api import (
    NODE_NAME_VARIABLE,
    PROGRESS_MARKER,
    FailureReason,
    Gang,
    GangNode,
    LinkReport,
    LinkTask,
    TrialSeriesReport,
    TrialSeriesTask,
    TrialTask,
)
from trainwright_worker.gang.local_launcher import host_of_its_own
from trainwright_worker.gang.rank_assignment import gang_devices

ROWS, MICRO_BATCHES = 8, 2
FOR_EVER = 1_000_000
LARGEST_LOSS_ERROR = 1e-4
"""Largest relative difference of losses in float32 between plans, which sum in different orders."""
SILENCE_SECONDS = 15.0
MAX_SECONDS = 60.0
"""Time within which a gang has noticed a lost or a hanging process."""


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield plans compared with one process, then what the worker's own commands do."""
    gangs = SharedGangs(hardware)
    yield Subject("links", gangs.links)
    yield Subject("plans from equal weights", gangs.plans)
    yield Subject("stopped rank", gangs.stopped)
    yield Subject("lost node", gangs.lost)
    processes = 2 if hardware.small else PROCESSES
    yield Subject("memory", partial(findings_of_pipelines, hardware, processes))
    yield from gang_subjects(hardware, hardware.backend, processes, share_device=True, names=("gpt", "llama"))


@dataclass(frozen=True)
class SharedGangs:
    """Gangs of several nodes, whose first slots are all the first device of this machine."""

    hardware: Hardware

    @property
    def model(self) -> Model:
        gpt = Gpt(2, 64, 4, 32, 256) if self.hardware.small else Gpt(4, 256, 4, 128, 1021)
        return Model.of(gpt, Dtype.FLOAT32)

    def gang(self, nodes: int, **limits: float) -> Gang:
        """Return a gang of nodes of one slot."""
        named = tuple(GangNode(f"node-{number}", (0,), self.hardware.name) for number in range(nodes))
        return replace(WorkerCommands(self.hardware).gang(), nodes=named, **limits)  # type: ignore[arg-type]

    def plan(self, devices: tuple[Device, ...], *, data: int = 1, tensor: int = 1, sharding: Sharding) -> Plan:
        """Return a plan of equal stages."""
        return uniform_plan(
            len(self.model.layers),
            devices,
            rows=ROWS,
            micro_batches=MICRO_BATCHES,
            data=data,
            tensor=tensor,
            sharding=sharding,
        )

    def plans(self) -> Iterator[Finding]:
        """Train by several plans, whose ranks draw their own parts of the same weights, and compare the losses."""
        gang = self.gang(2 if self.hardware.small else 4)
        devices = gang_devices(gang)
        plans = {
            "one device": self.plan(devices[:1], sharding=Sharding.NONE),
            "stages": self.plan(devices, sharding=Sharding.NONE),
            "data": self.plan(devices, data=len(devices), sharding=Sharding.NONE),
            "zero1": self.plan(devices, data=len(devices), sharding=Sharding.ZERO1),
            "zero3": self.plan(devices, data=len(devices), sharding=Sharding.ZERO3),
            "tensor": self.plan(devices, tensor=len(devices), sharding=Sharding.NONE),
            "stages of zero2": self.plan(devices, data=2, sharding=Sharding.ZERO2),
            "stages of tensor 2": self.plan(devices, tensor=2, sharding=Sharding.NONE),
        }
        task = TrialSeriesTask(
            gang, self.model, tuple(plans.values()), warmup_iterations=1, iterations=2, timeline=True
        )
        report = WorkerCommands(self.hardware).report_of(task)
        if not isinstance(report, TrialSeriesReport):
            raise TypeError(f"the worker answered a series order with a {report.kind} report")
        alone = report.trials[0].losses
        for name, trial in zip(plans, report.trials, strict=True):
            error = max(abs(own / expected - 1) for own, expected in zip(trial.losses, alone, strict=True))
            measured = f"losses {error:.1g} off those of one device"
            yield judged(
                f"{name}: drawn weights", measured, f"below {LARGEST_LOSS_ERROR:g}", holds=error < LARGEST_LOSS_ERROR
            )

    def links(self) -> Iterator[Finding]:
        """Measure links, collectives and overlap, whose figures say nothing of a network."""
        task = LinkTask(self.gang(2), collective_bytes=(2**16, 2**20), collective_seconds=5.0, overlap=True)
        report = WorkerCommands(self.hardware).report_of(task)
        if not isinstance(report, LinkReport):
            raise TypeError(f"the worker answered a links order with a {report.kind} report")
        rates = ", ".join(f"{1e-9 * link.bandwidth_bytes_per_second:.3g} GB/s" for link in report.links)
        slowdowns = ", ".join(f"{one.compute_slowdown_ratio:.3g}" for one in report.overlaps)
        measured = f"{rates}; {len(report.collectives)} collectives; computation slows down {slowdowns} times"
        yield skipped("links through sockets on the loopback", "no network is like them", measured)

    def stopped(self) -> Iterator[Finding]:
        """Stop the process of a rank amid training, for which the others then wait in NCCL."""
        gang = self.gang(3, collective_timeout_seconds=SILENCE_SECONDS)
        plan = self.plan(gang_devices(gang), sharding=Sharding.NONE)
        worker = WorkerCommands(self.hardware).start(
            TrialTask(gang, self.model, plan, warmup_iterations=1, iterations=FOR_EVER), "local"
        )
        assert worker.stderr is not None
        victim = next(int(line.split()[-1]) for line in worker.stderr if line.startswith("rank 1 on "))
        _wait_for_progress(worker)
        begin = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        _, failures = ended(worker)
        seconds = time.monotonic() - begin
        named = [one for one in failures if "rank 1 on node-1:0 does not answer" in one.message]
        holds = {one.rank for one in named} == {0, 2} and {one.reason for one in named} == {FailureReason.HANG}
        told = "; ".join(f"rank {one.rank}: {one.doing}" for one in named)
        expected = f"both others name it within {MAX_SECONDS:.0f} s"
        measured = f"{len(named)} name it after {seconds:.0f} s ({told})"
        yield judged("stopped rank", measured, expected, holds=holds and seconds < MAX_SECONDS)

    def lost(self) -> Iterator[Finding]:
        """End a node with its launcher, so that NCCL alone notices."""
        gang = self.gang(2)
        plan = self.plan(gang_devices(gang), data=2, sharding=Sharding.NONE)
        task = TrialTask(gang, self.model, plan, warmup_iterations=1, iterations=FOR_EVER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        start = partial(WorkerCommands(self.hardware).start, task, "--master-addr", "127.0.0.1", "--master-port", port)
        pods = [
            start(**host_of_its_own(node.name), **{NODE_NAME_VARIABLE: node.name, "GLOO_SOCKET_IFNAME": "lo"})
            for node in gang.nodes
        ]
        first, second = pods
        _wait_for_progress(first)
        begin = time.monotonic()
        os.killpg(second.pid, signal.SIGKILL)
        second.communicate()
        _, failures = ended(first)
        seconds = time.monotonic() - begin
        told = "; ".join(f"{one.reason}: {one.message.splitlines()[0]}" for one in failures)
        holds = seconds < MAX_SECONDS and {one.reason for one in failures} == {FailureReason.PEER_LOST}
        expected = f"{FailureReason.PEER_LOST} within {MAX_SECONDS:.0f} s"
        yield judged("lost node", f"{told or 'nothing'} after {seconds:.0f} s", expected, holds=holds)


def _wait_for_progress(worker: subprocess.Popen[str]) -> None:
    """Wait until a worker has done an iteration, or has ended."""
    assert worker.stdout is not None
    any(PROGRESS_MARKER in line for line in worker.stdout)
