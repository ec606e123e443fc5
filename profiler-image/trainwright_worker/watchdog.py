"""Every order ends: a thread that ends its process at the deadline, or when nothing moves any more."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from trainwright.orders import FailureReason


class Watchdog:
    """Watches one process.

    Attributes:
        deadline_seconds: from now on, for the whole order.
        silence_seconds: the longest time between two beats, once the first beat came; before it (start-up waits for
            other pods) only the deadline counts.
    """

    def __init__(
        self, deadline_seconds: float, silence_seconds: float, give_up: Callable[[FailureReason, str], None]
    ) -> None:
        self.deadline_seconds = deadline_seconds
        self.silence_seconds = silence_seconds
        self._give_up = give_up
        self._end = time.monotonic() + deadline_seconds
        self._beat: float | None = None
        self._doing = "starting"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, doing: str) -> None:
        """Something moved: from now on this process is busy with `doing`."""
        self._doing = doing
        self._beat = time.monotonic()

    def stop(self) -> None:
        """The order is done; nothing is watched any more."""
        self._stopped.set()

    def _complaint(self, now: float) -> str | None:
        if now >= self._end:
            return f"the deadline of {self.deadline_seconds:g} s was reached while {self._doing}"
        if self._beat is not None and now - self._beat >= self.silence_seconds:
            return f"nothing moved for {self.silence_seconds:g} s while {self._doing}"
        return None

    def _watch(self) -> None:
        pause = min(1.0, self.silence_seconds / 10, self.deadline_seconds / 10)
        while not self._stopped.wait(pause):
            complaint = self._complaint(time.monotonic())
            if complaint is not None:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._give_up(FailureReason.HANG, complaint)
                sys.stderr.flush()
                os._exit(1)
