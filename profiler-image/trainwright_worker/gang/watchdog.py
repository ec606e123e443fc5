"""Watchdog: a thread that ends its process at the deadline, when nothing progresses or when a connection broke."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable

from trainwright.worker_api import FailureReason

_FAULTHANDLER_GRACE_SECONDS = 5.0
"""Delay after which faulthandler's timer ends a process whose watchdog cannot run because a call holds the GIL."""

WATCHDOG_THREADS = ("watchdog", "bell", "signals", "last words")
"""Names of monitoring threads, which are left out of stack dumps."""

_WAITING_FILES = (
    "/torch/distributed/",
    "/torch/cuda/__init__.py",
    "/trainwright_worker/device.py",
    *(
        f"/executor/{name}.py"
        for name in ("boundary_exchange", "flat_parameter", "gradient_reduction", "process_groups")
    ),
)
"""Files in which a thread waits for other processes, or for the device, which may wait for them."""


class Watchdog:
    """Watchdog of one process.

    Attributes:
        deadline_seconds: time for the whole task, from construction.
        max_silence_seconds: maximum time between two beats; before the first beat (start-up waits for other pods) only the
            deadline counts.
        plan_position: the part of the plan that the process computes, as text.
        doing: the current action.
        describe_device: returns what the device has reached, as text; empty if it has begun all actions.
        find_broken_connection: returns which connection the back end has given up, as text; empty if none.
    """

    def __init__(
        self, deadline_seconds: float, max_silence_seconds: float, give_up: Callable[[FailureReason, str], None]
    ) -> None:
        self.deadline_seconds = deadline_seconds
        self.max_silence_seconds = max_silence_seconds
        self.plan_position = ""
        self.doing = "starting"
        self.describe_device: Callable[[], str] = str
        self.find_broken_connection: Callable[[], str] = str
        self._give_up = give_up
        self._deadline = time.monotonic() + deadline_seconds
        self._last_beat = time.monotonic()
        self._has_beaten = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, doing: str) -> None:
        """Record progress: the action `doing` begins."""
        self.doing = doing
        self._last_beat = time.monotonic()
        self._has_beaten = True

    @property
    def seconds_since_beat(self) -> float:
        return time.monotonic() - self._last_beat

    def stop(self) -> None:
        """Stop watching: the task is done."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _failure(self, now: float) -> tuple[FailureReason, str] | None:
        if broken := self.find_broken_connection():
            return FailureReason.PEER_LOST, broken
        message = self._timeout_message(now)
        return (FailureReason.HANG, message) if message else None

    def _timeout_message(self, now: float) -> str | None:
        if now >= self._deadline:
            return f"the deadline of {self.deadline_seconds:g} s was reached"
        if self._has_beaten and now - self._last_beat >= self.max_silence_seconds:
            return f"no progress for {self.max_silence_seconds:g} s"
        return None

    def _watch(self) -> None:
        pause = min(1.0, self.max_silence_seconds / 10, self.deadline_seconds / 10)
        while not self._stopped.wait(pause):
            now = time.monotonic()
            failure = self._failure(now)
            if failure is not None:
                # A query of the device can hold the interpreter; then this ends the process.
                faulthandler.dump_traceback_later(6 * _FAULTHANDLER_GRACE_SECONDS, exit=True, file=sys.stderr)
                self._give_up(*failure)
                return
            left = min(self._deadline - now, self.max_silence_seconds) if self._has_beaten else self._deadline - now
            faulthandler.dump_traceback_later(left + _FAULTHANDLER_GRACE_SECONDS, exit=True, file=sys.stderr)
            if self._stopped.is_set():  # stopped while the timer was being set
                faulthandler.cancel_dump_traceback_later()


def format_stacks() -> str:
    """Return the Python stacks of this process's threads, without monitoring threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for number, frame in sys._current_frames().items():  # noqa: SLF001 (no public API gives other threads' stacks)
        name = names.get(number, str(number))
        if name not in WATCHDOG_THREADS:
            lines += [f"thread {name} (most recent call last):\n", *traceback.format_stack(frame)]
    return "".join(lines)


def is_waiting() -> bool:
    """Return whether the main thread is inside a message, a collective or a wait for the device: peers may block it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    return frame is not None and any(place in frame.f_code.co_filename for place in _WAITING_FILES)
