"""Moments and what lies between them: on the process's clock, or on a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from trainwright_worker.device import synchronize

Moment = float | torch.cuda.Event


class Clock:
    """Marks moments and tells the seconds between two of them.

    On a GPU a mark is an event on the stream, since a process only asks for work there and runs ahead of it: what lies
    between two events is what the GPU did, and marking does not make anybody wait.

    Args:
        read: the clock of a CPU; `time.thread_time` does not count what other processes do meanwhile.
    """

    def __init__(self, device: torch.device, read: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self._read = read

    def mark(self) -> Moment:
        if self.device.type != "cuda":
            return self._read()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Wait until the device has passed all marks; before that there are no seconds between them."""
        synchronize(self.device)

    @staticmethod
    def seconds(begin: Moment, end: Moment) -> float:
        """Between two marks of one clock."""
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        if isinstance(begin, float) or isinstance(end, float):
            raise TypeError("one mark is of the process's clock and the other of a GPU's")
        return float(begin.elapsed_time(end)) / 1e3
