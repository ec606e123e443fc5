"""Eight processes of one gloo group on loopback, for programs that compare plans with one process.

GANG_WORLD sets the number of processes, GANG_BACKEND the back end. All share the device that GANG_DEVICE names: with
`staged` they need one, with `nccl` each has a GPU of its own without it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import staged_group
import torch
import torch.distributed as dist

from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.gang.local_launcher import host_of_its_own

T = TypeVar("T")
WORLD = int(os.environ.get("GANG_WORLD", "8"))
BACKEND = os.environ.get("GANG_BACKEND", "gloo")
SHARED_DEVICE = os.environ.get("GANG_DEVICE")
TIMEOUT = timedelta(seconds=60)


def start(member: Callable[..., None], arguments: tuple[str, ...], preload: str) -> int:
    """Run `member(rank, port, *arguments)` in each process. Returns 0 if all succeed; a failure ends the others."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    processes = [context.Process(target=member, args=(rank, store.port, *arguments)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        time.sleep(0.1)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return 0 if codes == [0] * WORLD else 1


def device_of(rank: int) -> torch.device:
    """Return the shared device if there is one, else with nccl the rank's own GPU, else the CPU."""
    if SHARED_DEVICE:
        return torch.device(SHARED_DEVICE)
    return torch.device("cuda", rank) if BACKEND == "nccl" else torch.device("cpu")


def draws_own_weights() -> bool:
    """Return whether weights may be drawn on another kind of device than those of one process on the CPU."""
    return BACKEND != "gloo"


def join(rank: int, port: int) -> ProcessGroups:
    """Join the process group."""
    torch.set_num_threads(1)
    if BACKEND == staged_group.NAME:
        staged_group.register()
    if BACKEND == "nccl" and SHARED_DEVICE:
        os.environ.update(host_of_its_own(f"rank-{rank}"))
    if device_of(rank).type == "cuda":
        torch.cuda.set_device(device_of(rank))
        torch.backends.cudnn.allow_tf32 = False  # convolutions as exact as on the CPU they are compared with
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    return ProcessGroups(TIMEOUT)


def shared_out(rank: int, count: int, compute: Callable[[int], T]) -> Iterator[T]:
    """Yield what `compute` returns for 0, 1, …, `count` - 1; of every eight in a row each process computes one.

    All processes take part, each at its own place of the same loop.
    """
    for first in range(0, count, WORLD):
        found: list[Any] = [None] * WORLD
        dist.all_gather_object(found, compute(first + rank) if first + rank < count else None)
        yield from found[: count - first]


def leave(groups: ProcessGroups) -> None:
    """Leave the process group after a barrier."""
    dist.barrier()
    groups.close()
    dist.destroy_process_group()
