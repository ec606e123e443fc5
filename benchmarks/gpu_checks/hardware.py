"""Device under check: every call that only a GPU can answer, and its counterpart on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainwright.accelerators import DataSheet, data_sheet, has_data_sheet
from trainwright.layer import Dtype
from trainwright_worker.device import Clock, release_cached_memory
from trainwright_worker.executor.stage_module import TORCH_DTYPES

NATIVE_BFLOAT16 = (8, 0)
"""First compute capability with bfloat16 in its tensor cores (Ampere)."""
NO_GPU_SECONDS = "seconds of a shared CPU say nothing about a GPU"
ROUND = 10
"""Repetitions that a GPU is given at once, so that it does not wait for the process."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Device that the checks run on, and the size at which they run.

    Attributes:
        kind: `cuda` or `cpu`.
        small: whether sizes are tiny, to try the program rather than the device.
        folder: scratch folder.
    """

    kind: str
    small: bool
    folder: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def count(self) -> int:
        """Number of devices."""
        return torch.cuda.device_count() if self.is_gpu else 1

    @property
    def name(self) -> str:
        """Name of the device, as a node's label has it."""
        return torch.cuda.get_device_name(0).replace(" ", "-") if self.is_gpu else "cpu"

    @property
    def description(self) -> str:
        """Name, memory and versions."""
        if not self.is_gpu:
            return f"a CPU, torch {torch.__version__}"
        gib = self.memory_bytes / 2**30
        return f"{self.count} × {self.name} of {gib:.0f} GiB, torch {torch.__version__}, CUDA {torch.version.cuda}"

    @property
    def memory_bytes(self) -> int:
        """Total memory of one device."""
        return torch.cuda.get_device_properties(0).total_memory if self.is_gpu else 2**40

    @property
    def half(self) -> Dtype:
        """Half-precision format that the device computes natively."""
        if self.is_gpu and torch.cuda.get_device_capability(0) < NATIVE_BFLOAT16:
            return Dtype.FLOAT16
        return Dtype.BFLOAT16

    @property
    def torch_half(self) -> torch.dtype:
        return TORCH_DTYPES[self.half]

    @property
    def sheet(self) -> DataSheet | None:
        """Data sheet of the device, if there is one."""
        return data_sheet(self.name) if self.is_gpu and has_data_sheet(self.name) else None

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """Back end of process groups with one device for each process."""
        return "nccl" if self.is_gpu else "gloo"

    def prepare(self) -> None:
        """Make convolutions as exact as on the CPU that they are compared with; matrix products are by default."""
        torch.backends.cudnn.allow_tf32 = False
        if not self.is_gpu:
            torch.set_num_threads(1)

    def empty_cache(self) -> None:
        """Return cached memory to the device, so that one subject leaves nothing to the next."""
        release_cached_memory(self.device)

    def seconds_of(self, *phases: Callable[[], object], least_seconds: float = 1.0) -> list[float]:
        """Return the median seconds of each phase of a piece of work that is repeated, after a warm-up."""
        clock = Clock(self.device)
        least = 0.0 if self.small else least_seconds
        self._time_round(clock, phases)
        samples: list[list[float]] = []
        begin = time.perf_counter()
        while not samples or time.perf_counter() - begin < least:
            samples += self._time_round(clock, phases)
        return [statistics.median(column) for column in zip(*samples, strict=True)]

    def _time_round(self, clock: Clock, phases: tuple[Callable[[], object], ...]) -> list[list[float]]:
        repetitions = []
        for _ in range(2 if self.small else ROUND):
            marks = [clock.mark()]
            for phase in phases:
                phase()
                marks.append(clock.mark())
            repetitions.append(marks)
        clock.synchronize()
        return [[clock.elapsed_seconds(*pair) for pair in pairwise(marks)] for marks in repetitions]


@contextmanager
def kernels_before_ampere() -> Iterator[None]:
    """Let attention choose, while this holds, among the kernels that V100 and T4 have."""
    turing = mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 5))
    with turing, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
