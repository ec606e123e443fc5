"""Launcher of a whole gang on one machine, without Kubernetes; the gang's nodes share the machine's GPUs."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from trainwright.cluster import Device
from trainwright.worker_api import NODE_NAME_VARIABLE, Cause, Failure, FailureReason, Gang, GangNode
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.abort import AbortListener, GangSecret
from trainwright_worker.gang.errors import classify_exit_code, out_of_memory_kills
from trainwright_worker.gang.startup import watch_signals
from trainwright_worker.gang.termination import run_with_timeout

_GRACE_SECONDS = 10.0
"""Time that the other processes have, after the first failure, to notice and report it."""
_TALK_SECONDS = 2.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _LocalProcess:
    device: Device
    process: BaseProcess


def main(
    gang: Gang,
    rank_devices: Sequence[Device],
    task_path: Path,
    run_task: Callable[[str, GangSecret], None],
    visible_devices: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Run the task in each process of the gang until they exit. Returns 0 if every process succeeded, else 1.

    `visible_devices`: GPUs that the processes of each node see, those of its slots first. Nodes that are only types of GPUs in one
    machine then communicate as within it; without this, they count as machines of their own.
    """
    secret = GangSecret.new()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        # Fork before the store starts its thread: a process forked from a threaded one may deadlock on its locks.
        processes = _start_processes(gang, partial(run_task, str(task_path), secret), listener, visible_devices or {})
        stop_requested = threading.Event()
        watch_signals(lambda name: _report_signal(name, stop_requested))
        # Host the store here, since its host must exit last.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=1),
            master_listen_fd=os.dup(listener.fileno()),
        )
        local_gang = _LocalGang(processes, rank_devices, AbortListener("127.0.0.1", port, secret))
        succeeded = local_gang.wait(gang.deadline_seconds + 2 * _GRACE_SECONDS, stop_requested)
        del store
    return 0 if succeeded else 1


def _report_signal(signal_name: str, stop_requested: threading.Event) -> None:
    report_writer.write_failure(Failure(FailureReason.TERMINATED, f"the gang was stopped by a signal ({signal_name})"))
    stop_requested.set()


def _start_processes(
    gang: Gang, run_task: Callable[[], None], listener: socket.socket, visible_devices: Mapping[str, Sequence[str]]
) -> list[_LocalProcess]:
    context = multiprocessing.get_context("fork")
    world = sum(len(node.slots) for node in gang.nodes)
    processes: list[_LocalProcess] = []
    for node in gang.nodes:
        for local, slot in enumerate(node.slots):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
                "RANK": str(len(processes)),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),  # all share this machine, whatever their nodes are
                "GLOO_SOCKET_IFNAME": "lo",
                NODE_NAME_VARIABLE: node.name,
                **_gpu_variables(gang, node, visible_devices),
            }
            started = context.Process(target=_run_process, args=(run_task, environment, listener), daemon=True)
            started.start()
            processes.append(_LocalProcess(Device(node.name, slot), started))
    return processes


def _gpu_variables(gang: Gang, node: GangNode, visible_devices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    if visible_devices:
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible_devices[node.name])}
    return host_of_its_own(node.name) if len(gang.nodes) > 1 else {}


def host_of_its_own(name: str) -> dict[str, str]:
    """Return the variables with which NCCL takes a process's machine for another than that of other names.

    It then sends between them as between machines, through sockets, and lets them share a GPU, which it refuses within one.
    """
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}


def _run_process(run_task: Callable[[], None], environment: dict[str, str], listener: socket.socket) -> None:
    listener.close()  # or the store would seem reachable after its host is gone
    os.environ.update(environment)
    run_task()


class _LocalGang:
    """Processes of a gang, monitored by their launcher."""

    def __init__(
        self, processes: Sequence[_LocalProcess], rank_devices: Sequence[Device], abort_listener: AbortListener
    ) -> None:
        self._processes = processes
        self._rank_devices = rank_devices
        self._abort_listener = abort_listener
        self._oom_kills_before = out_of_memory_kills()
        self._reported: set[Device] = set()

    def wait(self, deadline_seconds: float, stop_requested: threading.Event) -> bool:
        """Wait for all processes. Returns whether all succeeded.

        After the first failure or a stop request the others get a grace period; then, or at the deadline, they are killed.
        """
        end = time.monotonic() + deadline_seconds
        is_stopping = False
        while any(child.process.exitcode is None for child in self._processes) and time.monotonic() < end:
            for child in self._processes:
                self._report_exit(child)
            if stop_requested.is_set() and not is_stopping:
                for child in self._processes:
                    child.process.terminate()
            if not is_stopping and (
                stop_requested.is_set() or any(child.process.exitcode for child in self._processes)
            ):
                is_stopping = True
                end = min(end, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        for child in self._processes:
            if child.process.exitcode is None:
                self._kill_process(child)
            self._report_exit(child)
        return all(child.process.exitcode == 0 for child in self._processes)

    def _kill_process(self, child: _LocalProcess) -> None:
        """Kill a process that has exceeded its grace period: not even its watchdog could end it."""
        child.process.kill()
        child.process.join(_GRACE_SECONDS)
        self._reported.add(child.device)
        message = f"process {child.process.pid} did not exit and was killed"
        self._write_failure(FailureReason.HANG, message, child.device)

    def _report_exit(self, child: _LocalProcess) -> None:
        """Report a process that died silently and raise the abort signal."""
        code, device = child.process.exitcode, child.device
        if code is None or device in self._reported:
            return
        self._reported.add(device)
        out_of_memory = out_of_memory_kills() > self._oom_kills_before
        problem = classify_exit_code(code, process_name=f"process {child.process.pid}", out_of_memory=out_of_memory)
        if problem is None:
            return
        self._write_failure(problem.reason, problem.message, device)
        cause = Cause(problem.reason, problem.message, device.node, device.slot)
        run_with_timeout(_TALK_SECONDS, lambda: self._notify_gang(cause))

    def _write_failure(self, reason: FailureReason, message: str, device: Device) -> None:
        rank = self._rank_devices.index(device)
        report_writer.write_failure(Failure(reason, message, rank=rank, node=device.node, slot=device.slot))

    def _notify_gang(self, cause: Cause) -> None:
        board = self._abort_listener.connect_board()
        board.report_pod_failure(cause)
        board.raise_abort(cause)
