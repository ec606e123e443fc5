"""Recorder of a rank's timeline, idle unless an iteration is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trainwright.timeline import Action, Moment
from trainwright_worker import device as device_module
from trainwright_worker.device import Clock

_MIN_RECORDED_SECONDS = 20e-6
"""Shorter waits and collectives found nothing to wait for and would only fill the report."""

_ALWAYS_RECORDED = frozenset({Action.FORWARD, Action.BACKWARD, Action.UPDATE})

_NO_RECORDING = nullcontext()


class Recorder:
    """Recorder of the actions between `begin` and `end`; otherwise `action` costs next to nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = Clock(device)
        self._is_active = False
        self._iteration_start: device_module.TimeMark = 0.0
        self._marks: list[tuple[Action, int, device_module.TimeMark, device_module.TimeMark]] = []

    def begin(self) -> None:
        """Start recording an iteration."""
        self._marks.clear()
        self._is_active = True
        self._iteration_start = self._clock.mark()

    def action(self, action: Action, number: int = -1) -> AbstractContextManager[None]:
        """Record this action while the context lasts."""
        return self._record(action, number) if self._is_active else _NO_RECORDING

    @contextmanager
    def _record(self, action: Action, number: int) -> Iterator[None]:
        index = len(self._marks)
        start = self._clock.mark()
        self._marks.append((action, number, start, start))
        yield
        self._marks[index] = action, number, start, self._clock.mark()

    def end(self) -> list[Moment]:
        """Return the recorded actions by start time. Waits for the device."""
        self._is_active = False
        self._clock.synchronize()
        moments = []
        for action, number, start, end in self._marks:
            start_seconds, end_seconds = (
                self._clock.elapsed_seconds(self._iteration_start, start),
                self._clock.elapsed_seconds(self._iteration_start, end),
            )
            if action not in _ALWAYS_RECORDED and end_seconds - start_seconds < _MIN_RECORDED_SECONDS:
                continue
            first = round(start_seconds * 1e6)
            moments.append(Moment(action, number, first, max(round(end_seconds * 1e6) - first, 0)))
        self._marks.clear()
        return moments
