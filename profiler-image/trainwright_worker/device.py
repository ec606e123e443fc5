"""The device of a process: a GPU with nccl, the CPU with gloo."""

from __future__ import annotations

import torch

from trainwright.orders import FailureReason, Gang
from trainwright_worker.failures import WorkerError
from trainwright_worker.seat import Seat


def choose(gang: Gang, seat: Seat) -> torch.device:
    """The seat's device: with nccl the GPU with the process's local rank. Raises WorkerError where there is none."""
    if gang.backend == "gloo":
        # One thread a process: several emulated devices share a machine's cores.
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        return torch.device("cpu")
    if torch.cuda.device_count() <= seat.local_rank:
        raise WorkerError(
            FailureReason.PLACEMENT_NOT_MET,
            f"process {seat.local_rank} on node {seat.device.node} needs a GPU of its own, but torch sees "
            f"{torch.cuda.device_count()}",
        )
    device = torch.device("cuda", seat.local_rank)
    torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
