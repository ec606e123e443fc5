"""Every order ends: a thread that ends its process at the deadline, or when nothing moves any more."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable

from trainwright.orders import FailureReason

_SECOND_LINE_SECONDS = 5.0
"""So much later the interpreter's own timer ends a process whose watchdog cannot run: a call keeps the interpreter."""

WATCHERS = ("watchdog", "bell", "signals", "last words")
"""Names of the threads that watch over a process, whose own stacks tell nothing."""

_COMMUNICATION = (
    "/torch/distributed/",
    *(f"/executor/{name}.py" for name in ("messages", "reduction", "tensor_group", "unit")),
)
"""Files in which a thread waits for other processes."""


class Watchdog:
    """Watches one process.

    Attributes:
        deadline_seconds: from now on, for the whole order.
        silence_seconds: the longest time between two beats, once the first beat came; before it (start-up waits for
            other pods) only the deadline counts.
        place: which part of a plan the process computes, in words.
        doing: what the process is busy with.
    """

    def __init__(
        self, deadline_seconds: float, silence_seconds: float, give_up: Callable[[FailureReason, str], None]
    ) -> None:
        self.deadline_seconds = deadline_seconds
        self.silence_seconds = silence_seconds
        self.place = ""
        self.doing = "starting"
        self._give_up = give_up
        self._end = time.monotonic() + deadline_seconds
        self._since = time.monotonic()
        self._has_begun = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, doing: str) -> None:
        """Something moved: from now on this process is busy with `doing`."""
        self.doing = doing
        self._since = time.monotonic()
        self._has_begun = True

    @property
    def seconds(self) -> float:
        """Since the last beat."""
        return time.monotonic() - self._since

    def stop(self) -> None:
        """The order is done; nothing is watched any more."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _complaint(self, now: float) -> str | None:
        if now >= self._end:
            return f"the deadline of {self.deadline_seconds:g} s was reached"
        if self._has_begun and now - self._since >= self.silence_seconds:
            return f"nothing moved for {self.silence_seconds:g} s"
        return None

    def _watch(self) -> None:
        pause = min(1.0, self.silence_seconds / 10, self.deadline_seconds / 10)
        while not self._stopped.wait(pause):
            now = time.monotonic()
            complaint = self._complaint(now)
            if complaint is not None:
                faulthandler.cancel_dump_traceback_later()
                self._give_up(FailureReason.HANG, complaint)
                return
            left = min(self._end - now, self.silence_seconds) if self._has_begun else self._end - now
            faulthandler.dump_traceback_later(left + _SECOND_LINE_SECONDS, exit=True, file=sys.stderr)
            if self._stopped.is_set():  # just now, before the timer was set anew
                faulthandler.cancel_dump_traceback_later()


def stacks() -> str:
    """The Python stacks of this process's threads, but for those that merely watch over it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for number, frame in sys._current_frames().items():  # noqa: SLF001 (there is no other way to see other threads)
        name = names.get(number, str(number))
        if name not in WATCHERS:
            found += [f"thread {name} (most recent call last):\n", *traceback.format_stack(frame)]
    return "".join(found)


def waits_for_others() -> bool:
    """Whether this process's main thread is inside a message or a collective, so that others may keep it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    return frame is not None and any(place in frame.f_code.co_filename for place in _COMMUNICATION)
