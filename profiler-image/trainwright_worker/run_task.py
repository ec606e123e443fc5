"""Process that runs a task: joins the others of its gang, measures and reports how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.cluster import Device
from trainwright.worker_api import LinkTask, ProfilingTask, TrialSeriesTask, TrialTask, WorkerReport, WorkerTask
from trainwright_worker import device, trial, validation
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.abort import AbortListener, GangSecret
from trainwright_worker.gang.errors import classify_error
from trainwright_worker.gang.rank_assignment import RankAssignment, gang_devices
from trainwright_worker.gang.startup import reset_signal_handlers, watch_signals
from trainwright_worker.gang.termination import TerminationReporter
from trainwright_worker.gang.version_check import check_versions, own_version
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.measure import layer_bench, link_bench
from trainwright_worker.model_description.left_out_checks import check_left_out

_BACKEND_TIMEOUT_FACTOR = 1.5
"""Ratio of the back end's timeout to the watchdog's, which fires first because it reports where the process is stuck."""


_BROKEN = ("COMM_ERROR", "REMOTE_ERROR")
"""Errors of torch's `ErrorType` that mean a lost connection; a timeout is the watchdog's to find."""


def main(task_path: str, secret: GangSecret) -> None:
    """Run the task in this process. On failure the process reports it and exits with `REPORTED_EXIT_CODE`."""
    reset_signal_handlers()
    reporter = TerminationReporter()
    watch_signals(reporter.report_signal)
    try:
        _run_task(Path(task_path), secret, reporter)
    except BaseException as error:  # noqa: BLE001 (every error is reported)
        reporter.log(traceback.format_exc())
        reporter.report_error(classify_error(error))


def _run_task(task_path: Path, secret: GangSecret, reporter: TerminationReporter) -> None:
    task = validation.read_task(task_path)
    gang, devices = task.gang, task_devices(task)
    watchdog = reporter.watchdog = Watchdog(
        gang.deadline_seconds, gang.collective_timeout_seconds, reporter.report_by_watchdog
    )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = reporter.abort_listener = AbortListener(address, port, secret, devices)
    assignment = reporter.assignment = RankAssignment.from_environment(gang, devices)
    sys.stderr.write(f"rank {assignment.rank} on {assignment.device} is process {os.getpid()}\n")
    own_device = device.choose_device(gang, assignment)
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # its reasons are in its log alone
    timeout = timedelta(seconds=_BACKEND_TIMEOUT_FACTOR * gang.collective_timeout_seconds)
    start_up = timedelta(seconds=gang.deadline_seconds)
    store = dist.TCPStore(address, port, is_master=False, timeout=start_up)  # type: ignore[attr-defined]
    listener.listen(reporter.report_abort)
    _init_process_group(task, assignment, store, timeout)
    watchdog.find_broken_connection = lambda: broken_connection(dist.distributed_c10d._world.pg_map, own_device)  # noqa: SLF001
    watchdog.beat("waiting for all ranks")
    versions = dist.PrefixStore("versions", store)  # type: ignore[attr-defined]
    check_versions(versions, assignment.rank, assignment.devices, own_version(gang.backend))
    device.barrier(own_device)
    report = _dispatch_task(task, assignment, own_device, watchdog, timeout)
    if assignment.is_main_process and getattr(task, "fault", None) != "mute":
        report_writer.write_report(report)
    watchdog.beat("waiting for all ranks at the end")
    listener.close()
    device.barrier(own_device)
    watchdog.beat("closing process groups")
    dist.destroy_process_group()
    watchdog.stop()


def task_devices(task: WorkerTask) -> tuple[Device, ...]:
    """Return the task's devices by logical rank: the plan's order for a trial, else the gang's."""
    if isinstance(task, TrialTask):
        return task.plan.devices
    return gang_devices(task.gang)


def broken_connection(groups: Iterable[Any], own_device: torch.device) -> str:
    """Return that NCCL has given up a process group; empty if none, or the back end is another.

    Torch's own watchdog notices it, too, and aborts the process a minute later, which then reports nothing.
    """
    for group in tuple(groups):
        try:
            error = group._get_backend(own_device).get_error()  # noqa: SLF001 (no public function tells it)
        except (AttributeError, RuntimeError):  # gloo keeps no error; a group may be destroyed meanwhile
            continue
        if error.name in _BROKEN:
            return f"NCCL gave up a connection ({error.name}); its warnings in the log say why"
    return ""


def _init_process_group(task: WorkerTask, assignment: RankAssignment, store: Any, timeout: timedelta) -> None:
    """Initialise the process group with the logical rank that the plan assigns to this device.

    Ranks are mapped first, so that every group's ranks are ascending: a scrambled mesh would give wrong gradients without
    an error.
    """
    dist.init_process_group(
        task.gang.backend,
        store=dist.PrefixStore("trainwright", store),  # type: ignore[attr-defined]
        rank=assignment.rank,
        world_size=assignment.world_size,
        timeout=timeout,
    )


def _dispatch_task(
    task: WorkerTask, assignment: RankAssignment, own_device: torch.device, watchdog: Watchdog, timeout: timedelta
) -> WorkerReport:
    match task:
        case TrialTask():
            return trial.run_trial(task, assignment, own_device, watchdog, timeout)
        case TrialSeriesTask():
            return trial.run_series(task, assignment, own_device, watchdog, timeout)
        case ProfilingTask():
            unchecked = check_left_out(task, own_device, watchdog.beat, is_main_process=assignment.is_main_process)
            return replace(layer_bench.profile_layers(task, assignment, own_device, watchdog), unchecked=unchecked)
        case LinkTask():
            return link_bench.measure_links(task, assignment, own_device, watchdog)
