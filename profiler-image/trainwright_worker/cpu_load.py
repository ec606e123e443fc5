"""CPU time of other programs, which disturb measurements on a machine's CPU (Linux)."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of a line of /proc/stat in which a core works: user, nice, system, interrupts, and what the host took of it."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since some moment: of the clock, of this process, and those in which the cores that it may use were busy."""

    clock: float
    own: float
    busy: float

    @classmethod
    def now(cls) -> CpuTimes:
        return cls(time.perf_counter(), time.process_time(), busy_seconds(_STAT.read_text()) if _STAT.exists() else 0.0)

    def since(self, begin: CpuTimes) -> CpuTimes:
        """Return the differences to an earlier moment."""
        return CpuTimes(self.clock - begin.clock, self.own - begin.own, self.busy - begin.busy)


def busy_seconds(stat: str) -> float:
    """Return the busy seconds of the cores that this process may use, from the text of /proc/stat."""
    ticks, names = 0, {f"cpu{number}" for number in os.sched_getaffinity(0)}
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in names:
            ticks += sum(int(fields[number]) for number in _BUSY)
    return ticks / os.sysconf("SC_CLK_TCK")


def disturbing_cores(busy_cores: float, own_cores: float, devices: int) -> float:
    """Return how many of the cores that devices need others took: those beyond the cores that the devices leave free."""
    free = len(os.sched_getaffinity(0)) - devices
    return max(busy_cores - own_cores - max(free, 0), 0.0)
