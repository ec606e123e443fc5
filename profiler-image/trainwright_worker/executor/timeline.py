"""When a rank does what: a recorder that does nothing until it is asked to record an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trainwright.timeline import Action, Moment
from trainwright_worker import clock
from trainwright_worker.clock import Clock

_SHORTEST_SECONDS = 20e-6
"""A shorter wait found its message there, a shorter sum had nobody to meet: they say nothing and only take room."""

_ALWAYS_TOLD = frozenset({Action.FORWARD, Action.BACKWARD, Action.UPDATE})

_NOTHING = nullcontext()


class Recorder:
    """Records the actions between `begin` and `end`; outside of them `action` costs next to nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = Clock(device)
        self._is_active = False
        self._begun: clock.Moment = 0.0
        self._marks: list[tuple[Action, int, clock.Moment, clock.Moment]] = []

    def begin(self) -> None:
        """The iteration begins now."""
        self._marks.clear()
        self._is_active = True
        self._begun = self._clock.mark()

    def action(self, action: Action, number: int = -1) -> AbstractContextManager[None]:
        """While it lasts, the rank does this."""
        return self._recorded(action, number) if self._is_active else _NOTHING

    @contextmanager
    def _recorded(self, action: Action, number: int) -> Iterator[None]:
        place = len(self._marks)
        start = self._clock.mark()
        self._marks.append((action, number, start, start))
        yield
        self._marks[place] = action, number, start, self._clock.mark()

    def end(self) -> list[Moment]:
        """What was recorded, in the order of its starts. Waits for the device."""
        self._is_active = False
        self._clock.settle()
        found = []
        for action, number, start, end in self._marks:
            begun, ended = self._clock.seconds(self._begun, start), self._clock.seconds(self._begun, end)
            if action not in _ALWAYS_TOLD and ended - begun < _SHORTEST_SECONDS:
                continue
            first = round(begun * 1e6)
            found.append(Moment(action, number, first, max(round(ended * 1e6) - first, 0)))
        self._marks.clear()
        return found
