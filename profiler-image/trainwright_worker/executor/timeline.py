"""When a rank does what: a recorder that does nothing until it is asked to record an iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trainwright.timeline import Action, Moment
from trainwright_worker.device import synchronize

_SHORTEST_SECONDS = 20e-6
"""A shorter wait found its message there, a shorter sum had nobody to meet: they say nothing and only take room."""

_ALWAYS_TOLD = frozenset({Action.FORWARD, Action.BACKWARD, Action.UPDATE})

_NOTHING = nullcontext()

_Mark = float | torch.cuda.Event
"""A moment: of the process's clock, or on a GPU's stream."""


class Recorder:
    """Records the actions between `begin` and `end`; outside of them `action` costs next to nothing.

    On a GPU the marks are events on the stream, since a process only asks for work there and runs ahead of it: what is
    recorded is when the GPU did it, and nothing waits for that but `end`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_active = False
        self._begun: _Mark = 0.0
        self._marks: list[tuple[Action, int, _Mark, _Mark]] = []

    def begin(self) -> None:
        """The iteration begins now."""
        self._marks.clear()
        self._is_active = True
        self._begun = self._now()

    def action(self, action: Action, number: int = -1) -> AbstractContextManager[None]:
        """While it lasts, the rank does this."""
        return self._recorded(action, number) if self._is_active else _NOTHING

    @contextmanager
    def _recorded(self, action: Action, number: int) -> Iterator[None]:
        place = len(self._marks)
        start = self._now()
        self._marks.append((action, number, start, start))
        yield
        self._marks[place] = action, number, start, self._now()

    def end(self) -> list[Moment]:
        """What was recorded, in the order of its starts. Waits for the device."""
        self._is_active = False
        synchronize(self.device)
        found = []
        for action, number, start, end in self._marks:
            begun, ended = self._since_begin(start), self._since_begin(end)
            if action not in _ALWAYS_TOLD and ended - begun < _SHORTEST_SECONDS:
                continue
            first = round(begun * 1e6)
            found.append(Moment(action, number, first, max(round(ended * 1e6) - first, 0)))
        self._marks.clear()
        return found

    def _now(self) -> _Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since_begin(self, mark: _Mark) -> float:
        """Seconds."""
        if isinstance(mark, float) and isinstance(self._begun, float):
            return mark - self._begun
        if isinstance(mark, float) or isinstance(self._begun, float):
            raise TypeError("a timeline mixes the process's clock with a GPU's")
        return float(self._begun.elapsed_time(mark)) / 1e3
