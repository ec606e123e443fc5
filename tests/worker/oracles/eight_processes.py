"""Eight processes of one gloo group on loopback, for programs that compare plans with one process.

On GPUs: as many as GANG_WORLD says, with nccl where GANG_BACKEND says so.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from trainwright_worker.executor.groups import Groups

WORLD = int(os.environ.get("GANG_WORLD", "8"))
BACKEND = os.environ.get("GANG_BACKEND", "gloo")
TIMEOUT = timedelta(seconds=60)


def start(member: Callable[..., None], arguments: tuple[str, ...], preload: str) -> int:
    """Run `member(rank, port, *arguments)` in each; 0 where all of them end well. One that fails ends the others."""
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
    """A GPU of its own with nccl, else the CPU."""
    return torch.device("cuda", rank) if BACKEND == "nccl" else torch.device("cpu")


def join(rank: int, port: int) -> Groups:
    """Meet the others."""
    torch.set_num_threads(1)
    if BACKEND == "nccl":
        torch.cuda.set_device(device_of(rank))
        torch.backends.cudnn.allow_tf32 = False  # convolutions as exact as the CPU they are compared with
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    return Groups(TIMEOUT)


def leave(groups: Groups) -> None:
    """Part from the others, all at once."""
    dist.barrier()
    groups.close()
    dist.destroy_process_group()
