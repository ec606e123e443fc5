"""A whole gang on one machine, without Kubernetes: every node of the gang is a group of local processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from trainwright.cluster import Device
from trainwright.orders import NODE_NAME_VARIABLE, Cause, Failure, FailureReason, Gang, WorkerOrder
from trainwright_worker import output, process
from trainwright_worker.bell import Bell
from trainwright_worker.failures import unspoken
from trainwright_worker.kernel import out_of_memory_kills
from trainwright_worker.last_words import within
from trainwright_worker.seat import devices
from trainwright_worker.start import heed_signals

_GRACE_SECONDS = 10.0
"""After the first process failed the others have this long to notice and to say so."""
_TALK_SECONDS = 2.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Child:
    """The process of one device."""

    device: Device
    process: BaseProcess


def main(order: WorkerOrder, order_path: Path) -> int:
    """Run the order's gang to its end. Returns 0 where every process did its part, else 1."""
    gang, ranks = order.gang, devices(order)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        # Forked before the store starts its thread: what is forked from a threaded process may wait for its locks.
        children = _start(gang, str(order_path), listener)
        told_to_end = threading.Event()
        heed_signals(lambda name: _tell_end(name, told_to_end))
        # Hosted here, since the host of the store must be the last to leave.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=1),
            master_listen_fd=os.dup(listener.fileno()),
        )
        family = _Family(children, ranks, Bell("127.0.0.1", port))
        succeeded = family.wait(gang.deadline_seconds + 2 * _GRACE_SECONDS, told_to_end)
        del store
    return 0 if succeeded else 1


def _tell_end(signal_name: str, told_to_end: threading.Event) -> None:
    output.failure(Failure(FailureReason.TERMINATED, f"the whole gang was told to end ({signal_name})"))
    told_to_end.set()


def _start(gang: Gang, order_path: str, listener: socket.socket) -> list[_Child]:
    context = multiprocessing.get_context("fork")
    world = sum(len(node.slots) for node in gang.nodes)
    children: list[_Child] = []
    for node in gang.nodes:
        for local, slot in enumerate(node.slots):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
                "RANK": str(len(children)),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world),
                "GLOO_SOCKET_IFNAME": "lo",
                NODE_NAME_VARIABLE: node.name,
            }
            started = context.Process(target=_child, args=(order_path, environment, listener), daemon=True)
            started.start()
            children.append(_Child(Device(node.name, slot), started))
    return children


def _child(order_path: str, environment: dict[str, str], listener: socket.socket) -> None:
    listener.close()  # or the store would seem to be there when its host is gone
    os.environ.update(environment)
    process.main(order_path)


class _Family:
    """The processes of a gang, watched from above."""

    def __init__(self, children: Sequence[_Child], ranks: Sequence[Device], bell: Bell) -> None:
        self._children = children
        self._ranks = ranks
        self._bell = bell
        self._kills = out_of_memory_kills()
        self._seen: set[Device] = set()

    def wait(self, deadline_seconds: float, told_to_end: threading.Event) -> bool:
        """Wait for all; after the first failure, at the deadline, or when told to, end what is left. True if all did well."""
        end = time.monotonic() + deadline_seconds
        is_ending = False
        while any(child.process.exitcode is None for child in self._children) and time.monotonic() < end:
            for child in self._children:
                self._tell_of(child)
            if told_to_end.is_set() and not is_ending:
                for child in self._children:
                    child.process.terminate()
            if not is_ending and (told_to_end.is_set() or any(child.process.exitcode for child in self._children)):
                is_ending = True
                end = min(end, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        for child in self._children:
            if child.process.exitcode is None:
                self._kill(child)
            self._tell_of(child)
        return all(child.process.exitcode == 0 for child in self._children)

    def _kill(self, child: _Child) -> None:
        """It was given its time; it stands so still that not even its watchdog could end it."""
        child.process.kill()
        child.process.join(_GRACE_SECONDS)
        self._seen.add(child.device)
        message = f"process {child.process.pid} did not end by itself and was killed"
        self._say(FailureReason.HANG, message, child.device)

    def _tell_of(self, child: _Child) -> None:
        """Where a process could not say why it ended, say it, and let the others hear it."""
        code, device = child.process.exitcode, child.device
        if code is None or device in self._seen:
            return
        self._seen.add(device)
        out_of_memory = out_of_memory_kills() > self._kills
        problem = unspoken(code, what=f"process {child.process.pid}", out_of_memory=out_of_memory)
        if problem is None:
            return
        self._say(problem.reason, problem.message, device)
        cause = Cause(problem.reason, problem.message, device.node, device.slot)
        within(_TALK_SECONDS, lambda: self._tell_others(cause))

    def _say(self, reason: FailureReason, message: str, device: Device) -> None:
        rank = self._ranks.index(device)
        output.failure(Failure(reason, message, rank=rank, node=device.node, slot=device.slot))

    def _tell_others(self, cause: Cause) -> None:
        board = self._bell.board()
        board.tell_of_pod(cause)
        board.ring(cause)
