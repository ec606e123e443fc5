"""Guard of all writes: none begins unless the lease was renewed a short while ago.

A process that was stopped and goes on, or that is cut off from the API server, refuses its own writes before another
operator may act. What it cannot prevent is a request that is delayed after this check (a process stopped between the
check and the first byte): preconditions on uid and resource version make such a request fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

WRITE_SECONDS: Final = 10.0
"""Time for writes after the start of a renewal; another operator waits for 15 s."""
_MIN_SECONDS: Final = 1.0
"""A write that has less time left is refused: it might arrive too late."""
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that goes on while the machine sleeps. No clock of a guest need notice that its hypervisor paused it."""


def boot_time() -> float:
    """Return seconds of a clock that nobody sets."""
    return time.clock_gettime(_CLOCK)


class NotLeading(Exception):  # noqa: N818 - a state, not a fault
    """Refusal of a write, because the lease was not renewed in time or the operator is stopping."""


class WriteGuard:
    """Time until which writes may begin, and the number of those under way."""

    def __init__(self, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._until = float("-inf")
        self._closed = False
        self._in_flight = 0

    def renewed(self, started: float) -> None:
        """Allow writes for a while after a renewal that started at this time of the clock."""
        with self._changed:
            self._until = started + WRITE_SECONDS

    @property
    def seconds_left(self) -> float:
        """Return for how long writes are allowed; negative afterwards."""
        return self._until - self._clock()

    @contextmanager
    def write(self) -> Iterator[float]:
        """Return the seconds within which a write must end. Raise NotLeading where none may begin."""
        with self._changed:
            left = self.seconds_left
            if self._closed:
                raise NotLeading("the operator is stopping")
            if left < _MIN_SECONDS:
                raise NotLeading(f"the lease was not renewed for {WRITE_SECONDS - left:.0f} s")
            self._in_flight += 1
        try:
            yield left
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def close(self, timeout: float = WRITE_SECONDS) -> bool:
        """Refuse further writes and wait for those under way. Return whether all have ended."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._in_flight == 0, timeout)
