"""`trainwright tune`: passes over one plan until it has its answer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from trainwright.report.units import duration
from trainwright.worker_api import Progress
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.flow import decide as flow
from trainwright_operator.flow.actions import EmitEvent, SetStatus
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.gangs.worker_log import parse_progress
from trainwright_operator.flow.phases.discovery import inspect_all
from trainwright_operator.flow.reasons import NEEDS_ACTION, Reason
from trainwright_operator.flow.snapshot import PlannerState, Snapshot
from trainwright_operator.local.apply import Applier
from trainwright_operator.local.chosen_devices import ChosenDevices, machine_of_plan
from trainwright_operator.local.expected_time import (
    LONG_SECONDS,
    ExpectedTime,
    flops_per_second,
)
from trainwright_operator.local.file_lock import FileLock
from trainwright_operator.local.gang_process import WORKER, is_worker, kill_group
from trainwright_operator.local.manifest import Manifest, read_manifest
from trainwright_operator.local.report import write_page
from trainwright_operator.local.snapshot import observe
from trainwright_operator.local.terminal import Terminal, describe_answer
from trainwright_operator.local.tuned_plan import TunedPlan
from trainwright_operator.local.winner import write_winner

ANSWERED, FAILED, NOTHING_FEASIBLE, INTERRUPTED = 0, 1, 3, 130
_STATE: Final = ".trainwright"
_PASS_SECONDS: Final = 2.0
"""Pause between passes while nothing ends; each takes CPU time from what is measured."""
_POLL_SECONDS: Final = 0.05
_MIN_FREE_BYTES: Final = 200_000_000


def tune(path: Path, *, state: Path | None = None, cpu_devices: int | None = None, stream: TextIO | None = None) -> int:
    """Find the plan of a manifest on this machine, and return the exit status.

    Raise ValueError with one sentence, nothing having been started, for input that cannot be used.
    """
    _check_packages()
    manifest = read_manifest(path)
    folder = state if state is not None else path.parent / _STATE / manifest.name
    machine = machine_of_plan(folder, manifest.spec.devices.resource_name, cpu_devices)
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk(folder)
    with FileLock(folder / "lock") as lock, FileLock(cache_folder() / "machine.lock") as machine_lock:
        if not lock.take():
            raise ValueError(f"{folder}: another `trainwright tune` works on this plan")
        for group in map(int, filter(str.isdecimal, lock.read().split())):
            if is_worker(group):
                kill_group(group)
        plan = TunedPlan.load(manifest, machine, folder, cache_folder() / "measurements")
        devices, left_out = inspect_all(observe(plan, datetime.now(UTC)), manifest.spec)
        if not devices.nodes:
            reasons = "; ".join(dict.fromkeys(node.reason for node in left_out))
            raise ValueError(f"{path}: none of this machine's devices can be used: {reasons}")
        ChosenDevices.of(machine).store(folder)
        terminal = Terminal(folder, sys.stdout if stream is None else stream, plan.status)
        for sentence in machine.left_out:
            terminal.line(f"left out: {sentence}")
        terminal.line(f"{manifest.name}: {describe_devices(devices)} of this machine")
        if not machine.has_gpus and not plan.status.is_answered:
            _tell_expected_time(manifest, devices, terminal)
        return Loop(plan, lock, machine_lock, terminal).run()


def _tell_expected_time(manifest: Manifest, devices: DiscoveredDevices, terminal: Terminal) -> None:
    """Tell how long the plan takes on a CPU, with a smaller model of the same family where that is long."""
    rate = flops_per_second()
    if rate is None:
        return
    expected = ExpectedTime(manifest.spec, devices.nodes, rate)
    terminal.line(f"expected to take about {duration(expected.seconds)} on a quiet machine")
    smaller = expected.find_smaller() if expected.seconds > LONG_SECONDS else None
    if smaller is not None:
        fields, seconds = smaller
        values = ", ".join(f"{name}: {value}" for name, value in fields.items())
        terminal.line(f"a model of the same family would take about {duration(seconds)}: {{{values}}}")


class Loop:
    """Passes over a plan, each as the operator makes one, until it has its answer or is interrupted."""

    def __init__(self, plan: TunedPlan, lock: FileLock, machine_lock: FileLock, terminal: Terminal) -> None:
        self._plan, self._lock, self._machine_lock, self._terminal = plan, lock, machine_lock, terminal
        self._applier = Applier(plan, machine_lock.take, terminal.event)
        self._signals = 0

    def run(self) -> int:
        """Return the exit status."""
        with self._signals_handled():
            while not flow.is_finished(snapshot := self._observe()):
                if self._signals:
                    return self._interrupt()
                if not self._pass(snapshot):
                    self._wait()
                problem = self._find_dead_end()
                if problem:
                    self._plan.stop()
                    self._terminal.line(problem)
                    return FAILED
            self._pass(snapshot)
            self._plan.stop()
        return self._answer()

    def _observe(self) -> Snapshot:
        # Only a plan with work that waits tries for the machine; one that has its answer needs no turn beside another.
        is_machine_taken = bool(self._plan.gangs) and not self._machine_lock.take()
        return observe(self._plan, datetime.now(UTC), is_machine_taken=is_machine_taken)

    def _pass(self, snapshot: Snapshot) -> bool:
        """Decide by what is observed, and apply once. Return whether anything was done besides telling of it."""
        now = datetime.now(UTC)
        todo = flow.decide(snapshot, now)
        for action in todo:
            if isinstance(action, SetStatus):
                self._terminal.show_ended_trials(action.status)
            self._applier.apply(action, now)
        self._lock.write(" ".join(str(gang.process_id) for gang in self._plan.running))
        self._terminal.show_progress(self._plan.status, self._gang_progress())
        return any(not isinstance(action, SetStatus | EmitEvent) for action in todo)

    def _gang_progress(self) -> Progress | None:
        """Return how far the gang is that runs, by its log."""
        logs = [gang.pods[0].log for gang in self._plan.running]
        return parse_progress(logs[0]) if logs and logs[0] is not None else None

    def _wait(self) -> None:
        """Wait until a process ends, a signal comes, or it is time to look again."""
        end, before = time.monotonic() + _PASS_SECONDS, self._activity()
        while time.monotonic() < end and not self._signals and self._activity() == before:
            time.sleep(_POLL_SECONDS)

    def _activity(self) -> tuple[int, PlannerState]:
        return len(self._plan.running), self._plan.search.state

    def _find_dead_end(self) -> str:
        """Return what the plan waits for in vain: nobody but the user can bring it about."""
        waiting = self._plan.status.waiting
        if waiting is None or waiting.reason not in NEEDS_ACTION:
            return ""
        condition = next((each for each in self._plan.status.conditions if each.reason == waiting.reason), None)
        return condition.message if condition is not None else str(waiting.reason)

    def _interrupt(self) -> int:
        """Store what is measured, end all processes, and return the exit status: a suspension, as in a cluster."""
        self._plan.is_suspended = True
        self._pass(self._observe())
        self._plan.stop()
        self._lock.write("")
        self._terminal.line("interrupted; the same command goes on from here")
        return INTERRUPTED

    def _answer(self) -> int:
        plan, status = self._plan, self._plan.status
        self._lock.write("")
        if status.winner is not None:
            write_winner(plan.manifest, status.winner, plan.folder)
            problem = write_page(plan)
            if problem:
                self._terminal.line(f"no page of the answer: {problem}")
        on_cpu = status.cluster is not None and not plan.machine.has_gpus
        self._terminal.text(describe_answer(status, plan.folder, on_cpu=on_cpu))
        succeeded = status.condition(ConditionType.SUCCEEDED)
        if succeeded is not None and succeeded.status == "True":
            return ANSWERED
        is_infeasible = succeeded is not None and succeeded.reason == Reason.NO_FEASIBLE_PLAN
        return NOTHING_FEASIBLE if is_infeasible else FAILED

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Count SIGINT and SIGTERM; the second one ends everything at once."""

        def note(number: int, frame: object) -> None:  # noqa: ARG001 - the interface of a handler
            self._signals += 1
            if self._signals > 1:
                self._plan.kill()
                os._exit(INTERRUPTED)

        numbers = (signal.SIGINT, signal.SIGTERM)
        former = [signal.signal(number, note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, former, strict=True):
                signal.signal(number, handler)


def cache_folder() -> Path:
    """Return the user's folder of measurements that plans share."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trainwright"


def describe_devices(devices: DiscoveredDevices) -> str:
    """Return the number of devices of each type."""
    return " and ".join(f"{each.devices} × {each.name}" for each in devices.status().accelerators)


def _check_packages() -> None:
    """Raise ValueError where a package is missing without which gangs cannot run."""
    for package in ("torch", WORKER):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the package {package} is not installed here; run `pip install 'trainwright[worker]'`")


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise ValueError(
            f"{folder}: {free / 1e6:.0f} MB are free there, and the measurements may take {_MIN_FREE_BYTES / 1e6:.0f} MB; free some"
        )
