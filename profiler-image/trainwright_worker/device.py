"""Device of a process: GPU with nccl or CPU with gloo, its clock, and emulated memory capacity."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.worker_api import FailureReason, Gang, RankMemory
from trainwright_worker.gang.errors import WorkerError, format_bytes
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.torch_releases import kernel_problem, start_problem


def check_capacity(peak: RankMemory, gang: Gang) -> None:
    """Raise WorkerError if a rank's peak exceeds its emulated device's memory, if that is known."""
    accelerator = gang.accelerator_of(peak.node)
    emulation = gang.emulation_of(accelerator)
    if emulation is None or emulation.memory_bytes is None or peak.peak_bytes <= emulation.memory_bytes:
        return
    excess_bytes = peak.peak_bytes - emulation.memory_bytes
    raise WorkerError(
        FailureReason.OUT_OF_MEMORY,
        f"asked for {format_bytes(peak.peak_bytes)} at its peak, the device ({accelerator}) has "
        f"{format_bytes(emulation.memory_bytes)}: {format_bytes(excess_bytes)} too much",
    )


def choose_device(gang: Gang, assignment: RankAssignment) -> torch.device:
    """Return the process's device: with nccl the GPU of its local rank. Raises WorkerError if torch cannot use it."""
    if gang.backend == "gloo":
        # Several emulated devices share a machine's cores.
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        return torch.device("cpu")
    if problem := _gpu_problem(assignment.local_rank):
        raise WorkerError(
            FailureReason.PLACEMENT_NOT_MET,
            f"process {assignment.local_rank} on node {assignment.device.node} has no usable GPU: {problem}",
        )
    device = torch.device("cuda", assignment.local_rank)
    torch.cuda.set_device(device)
    if problem := infiniband_problem():
        sys.stderr.write(f"{problem}\n")
    return device


def infiniband_problem(devices: Path = Path("/dev/infiniband"), library: str = "libibverbs.so.1") -> str | None:
    """Return why NCCL cannot use the node's InfiniBand or RoCE, and what to do; None if it can, or the node has none."""
    if not devices.exists():
        return None
    try:
        ctypes.CDLL(library)
    except OSError:
        return (
            f"this node has InfiniBand or RoCE, but the image has no {library}, so NCCL sends over TCP; build the worker's "
            "image on a BASE with libibverbs1 and ibverbs-providers"
        )
    return None


def _gpu_problem(index: int) -> str | None:
    """Return why torch cannot use a GPU of this machine, and what to do; None if it can."""
    version = torch.__version__.partition("+")[0]
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # an assertion where torch is built without CUDA
        return start_problem(version, torch.version.cuda, str(error))
    if torch.cuda.device_count() <= index:
        return f"each process needs its own, and torch sees {torch.cuda.device_count()}"
    capability = torch.cuda.get_device_capability(index)
    return kernel_problem(version, torch.cuda.get_device_name(index), capability, torch.cuda.get_arch_list())


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed_random_numbers(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the CPU and of this process's device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def read_value(tensor: Tensor) -> float:
    """Return the value of a tensor of shape (). Waits for the device: the only place of an iteration that does."""
    return float(tensor)


def barrier(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Wait until all members of the group arrive; all ranks by default.

    Without its device, NCCL's first call in a group takes the global rank modulo the devices of the node, while ranks follow
    the plan: two processes of a node would share a GPU.
    """
    dist.barrier(group, device_ids=None if device.index is None else [device.index])  # noqa: TID251


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the sums of numbers over all ranks; all of them call this."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [read_value(value) for value in total]


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the greatest of a number over all ranks; all of them call this."""
    greatest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return read_value(greatest)


def release_cached_memory(device: torch.device) -> None:
    """Return the GPU memory that torch's allocator keeps for later tensors, so that fragments of one plan burden no other."""
    if device.type == "cuda":
        gc.collect()  # what a finished executor refers to in cycles is still allocated
        torch.cuda.empty_cache()


class CacheFlush:
    """Buffer whose writing replaces what a GPU's L2 cache holds; nothing on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._buffer: torch.Tensor | None = None
        if device.type == "cuda":
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def run(self) -> None:
        """Overwrite the cache, in the device's order of work."""
        if self._buffer is not None:
            self._buffer.zero_()


TimeMark = float | torch.cuda.Event


class Clock:
    """Clock of a device: marks points in time and returns the seconds between them.

    On a GPU a mark is a CUDA event, since a process runs ahead of the device: the seconds between events are the GPU's, and
    marking does not synchronize.

    Args:
        read: clock on a CPU; `time.thread_time` excludes other processes' time.
    """

    def __init__(self, device: torch.device, read: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self._read = read

    def mark(self) -> TimeMark:
        if self.device.type != "cuda":
            return self._read()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return event

    def synchronize(self) -> None:
        """Wait until the device has passed all marks, which elapsed seconds require."""
        synchronize(self.device)

    @staticmethod
    def elapsed_seconds(begin: TimeMark, end: TimeMark) -> float:
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        if isinstance(begin, float) or isinstance(end, float):
            raise TypeError("cannot compare a time of the process clock with one of a GPU event")
        return float(begin.elapsed_time(end)) / 1e3  # type: ignore[no-untyped-call]


class Mark(Protocol):
    """Mark in the device's stream, as a CUDA event is."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class RunAheadLimit:
    """Limit of the operations that a process submits before its device has finished them.

    A tensor that NCCL sent or received is not free for others when the process drops it, but once the device has passed
    the message: a process that ran a whole iteration ahead would hold every boundary of it at once.

    Args:
        mark: marks the device's stream; None if the process does the operations itself.
        most: number of unfinished operations with which the process goes on; with a forward and a backward of the device
            ahead, those that take the process longer than the device do not stop it.
    """

    def __init__(self, mark: Callable[[], Mark] | None, most: int = 3) -> None:
        self._mark, self._most = mark, most
        self._marks: deque[Mark] = deque()

    @classmethod
    def of(cls, device: torch.device) -> RunAheadLimit:
        return cls(_stream_marker(device))

    def wait(self) -> None:
        """Wait until the device has finished all but the last few operations."""
        while len(self._marks) >= self._most:
            self._marks.popleft().synchronize()

    def mark(self) -> None:
        """Record that an operation is submitted."""
        if self._mark is not None:
            self._marks.append(self._mark())


class DeviceProgress:
    """Actions that the process has begun, and how many of them the device has.

    On a GPU the process runs ahead: where it waits, it only knows what it submitted last.

    Args:
        beat: called whenever an action begins in the process.
        mark: marks the device's stream; None if the process does the actions itself.
    """

    _MAX_MARKS = 4096

    def __init__(self, beat: Callable[[str], None], mark: Callable[[], Mark] | None) -> None:
        self._beat, self._mark = beat, mark
        self._marks: deque[tuple[str, Mark]] = deque(maxlen=self._MAX_MARKS)

    @classmethod
    def of(cls, device: torch.device, beat: Callable[[str], None]) -> DeviceProgress:
        return cls(beat, _stream_marker(device))

    def beat(self, doing: str) -> None:
        """Record that an action begins."""
        self._beat(doing)
        if self._mark is not None:
            self._marks.append((doing, self._mark()))

    def describe(self) -> str:
        """Return the action that the device has reached; empty if it has begun all. Other threads may call this."""
        marks = tuple(self._marks)
        pending = next((number for number, (_, mark) in enumerate(marks) if not mark.query()), len(marks))
        if pending == len(marks):
            return ""
        reached = marks[pending - 1][0] if pending else "an earlier action"
        return f"its device is at: {reached}; {len(marks) - pending} later actions wait, first: {marks[pending][0]}"


def _stream_marker(device: torch.device) -> Callable[[], Mark] | None:
    """Return what marks the device's stream; None if the process does the work itself."""
    return _mark_stream if device.type == "cuda" else None


def _mark_stream() -> Mark:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()  # type: ignore[no-untyped-call]
    return event
