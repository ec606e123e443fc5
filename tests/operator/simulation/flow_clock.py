"""Event loop with a clock of its own: it never sleeps, so hours of waiting take moments and no machine is too slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """Loop whose clock jumps to the next timer once nothing else is to be done. It waits for no threads."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            due = min((one.when() for one in self._scheduled if not one.cancelled()), default=None)
            assert due is not None, "nothing will ever happen"
            self._now = max(self._now, due)
        super()._run_once()  # type: ignore[misc]


def run_jumping(story: Coroutine[Any, Any, None]) -> None:
    """Run a story on such a loop."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(story)
