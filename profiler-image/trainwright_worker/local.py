"""A whole gang on one machine, without Kubernetes: every node of the gang is a group of local processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from trainwright.orders import NODE_NAME_VARIABLE, Gang
from trainwright_worker import process

_GRACE_SECONDS = 5.0
"""After the first process failed the others have this long to notice and to say so."""
_POLL_SECONDS = 0.05


def main(gang: Gang, order_path: Path) -> int:
    """Run the order's gang to its end. Returns 0 where every process did its part, else 1."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        # Forked before the store starts its thread: what is forked from a threaded process may wait for its locks.
        processes = _start(gang, str(order_path), port)
        # Hosted here, since the host of the store must be the last to leave.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=1),
            master_listen_fd=os.dup(listener.fileno()),
        )
        succeeded = _wait(processes, gang.deadline_seconds + 2 * _GRACE_SECONDS)
        del store
    return 0 if succeeded else 1


def _start(gang: Gang, order_path: str, port: int) -> list[BaseProcess]:
    context = multiprocessing.get_context("fork")
    world = sum(len(node.slots) for node in gang.nodes)
    processes: list[BaseProcess] = []
    for node in gang.nodes:
        for local in range(len(node.slots)):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(len(processes)),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world),
                "GLOO_SOCKET_IFNAME": "lo",
                NODE_NAME_VARIABLE: node.name,
            }
            started = context.Process(target=_child, args=(order_path, environment), daemon=True)
            started.start()
            processes.append(started)
    return processes


def _child(order_path: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    process.main(order_path)


def _wait(processes: list[BaseProcess], deadline_seconds: float) -> bool:
    """Wait for all processes; after the first failure, or at the deadline, end what is left. True if none failed."""
    end = time.monotonic() + deadline_seconds
    failed = False
    while any(one.exitcode is None for one in processes) and time.monotonic() < end:
        if not failed and any(one.exitcode for one in processes):
            failed = True
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    for one in processes:
        if one.exitcode is None:
            one.kill()
            one.join(_GRACE_SECONDS)
    for one in processes:
        if one.exitcode is not None and one.exitcode < 0:
            sys.stderr.write(f"process {one.pid} was ended by signal {-one.exitcode}\n")
    return all(one.exitcode == 0 for one in processes)
