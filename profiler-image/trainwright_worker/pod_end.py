"""A pod that is told to end says so, and does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from trainwright.orders import NODE_NAME_VARIABLE, Cause, Failure, FailureReason
from trainwright_worker import output
from trainwright_worker.start import heed_signals

_LAST_SECONDS = 4.0
"""A pod is killed some time after it was told to end; before that it ends its processes by itself or is gone."""


class PodEnd:
    """Waits, in a thread of its own, for the signal that tells this pod to end.

    Attributes:
        tell_others: lets the other pods know; set once there is a way to.
    """

    def __init__(self) -> None:
        self.tell_others: Callable[[Cause], None] = lambda _cause: None
        self._told = threading.Event()
        self._words: Failure | None = None

    def heed(self) -> None:
        """From now on."""
        heed_signals(self._end)

    def wait(self) -> None:
        """Until it has been said."""
        self._told.wait(_LAST_SECONDS)

    def from_inside(self, words: Failure) -> None:
        """End the pod with these words, as if it had been told to."""
        self._words = words
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, signal_name: str) -> None:
        node = os.environ.get(NODE_NAME_VARIABLE)
        message = f"the pod was told to end ({signal_name}): it was deleted, evicted or preempted"
        words = self._words or Failure(FailureReason.TERMINATED, message, node=node)
        output.failure(words)
        self.tell_others(Cause(words.reason, words.message, node))
        self._told.set()
        # The main thread ends the pod's processes meanwhile, unless it waits for pods that never come.
        threading.Event().wait(_LAST_SECONDS)
        sys.stderr.flush()
        os._exit(1)
