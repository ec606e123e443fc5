"""Device of a check of values, and its limits of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from trainwright_worker.device import synchronize

CPU: Final = torch.device("cpu")


class TimeOverError(Exception):
    """The time of a check is over."""


@dataclass
class CheckBudget:
    """Device of a check of values, and its limits; its time begins as it is made.

    Attributes:
        seconds: of time in a gang, which has a deadline, else of computation on as many cores as torch uses: there others
            on the machine do not shorten a check.
        max_bytes: that the check of a layer may take.
        is_trained_here: whether the model is to be trained on this device, so that it has to have all kernels.
        beat: called before each run of a layer with what is checked.
    """

    seconds: float
    max_bytes: float
    device: torch.device = CPU
    is_trained_here: bool = False
    beat: Callable[[str], None] = lambda _: None
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    def clock(self) -> float:
        """Return the seconds so far, the device's submitted work included."""
        synchronize(self.device)
        if self.is_trained_here:
            return time.perf_counter()
        return time.process_time() / torch.get_num_threads()

    @property
    def seconds_left(self) -> float:
        return self.seconds - (self.clock() - self._start)

    def begin_run(self, what: str) -> None:
        """Say what is checked. Raises TimeOverError if there is no time for it."""
        self.beat(f"checking the values of {what}")
        if self.seconds_left <= 0:
            raise TimeOverError
