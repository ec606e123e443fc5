"""Terminal output of a plan: events, how far it is, and the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from trainwright.outside.plain_text import plain_line
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import TrainingPlanStatus, TrialState, TrialStatus
from trainwright_operator.flow.actions import EmitEvent
from trainwright_operator.flow.reasons import Reason

_QUIET: Final = (Reason.SUSPENDED,)
"""Reasons of Events for which the terminal has words of its own."""
_WIDTH: Final = 118


class Terminal:
    """Lines on standard output, each with the seconds since the start; `folder` gets the Events, too."""

    def __init__(self, folder: Path, stream: TextIO) -> None:
        self._begin, self._folder, self._stream = time.monotonic(), folder, stream
        self._is_live, self._progress = stream.isatty(), ""

    def line(self, text: str) -> None:
        """Write a line."""
        self._clear()
        self._stream.write(f"{time.monotonic() - self._begin:6.1f} s  {text}\n")
        self._stream.flush()

    def text(self, text: str) -> None:
        """Write lines without a time."""
        self._clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def event(self, event: EmitEvent) -> None:
        """Write an Event, and note it in the state directory."""
        message = plain_line(event.message)
        with (self._folder / "events.log").open("a", encoding="utf-8") as log:
            log.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {event.type} {event.reason}: {message}\n")
        if event.reason not in _QUIET:
            self.line(f"{event.reason}: {message}")

    def show_progress(self, status: TrainingPlanStatus) -> None:
        """Show how far the present phase is, on a terminal."""
        if not self._is_live or status.progress is None:
            return
        text = f"{status.phase}: {plain_line(status.progress.text)}"[:_WIDTH]
        if text != self._progress:
            self._clear()
            self._stream.write(f"\r{time.monotonic() - self._begin:6.1f} s  {text}")
            self._stream.flush()
            self._progress = text

    def _clear(self) -> None:
        if self._progress:
            self._stream.write("\r\x1b[K")
            self._progress = ""


def describe_answer(status: TrainingPlanStatus, folder: Path, *, on_cpu: bool) -> str:
    """Return the answer: every trial, the winner, and where its files are."""
    return "\n".join(_answer_lines(status, folder, on_cpu=on_cpu))


def _answer_lines(status: TrainingPlanStatus, folder: Path, *, on_cpu: bool) -> Iterator[str]:
    if status.trials:
        yield ""
        yield f"{'trial':<13} {'predicted':>10} {'measured':>10} {'error':>7}  plan"
        yield from map(_trial_line, status.trials)
    succeeded = status.condition(ConditionType.SUCCEEDED)
    if succeeded is not None:
        yield ""
        yield f"{plain_line(succeeded.message)}."
    if status.winner is not None:
        yield f"The winner's files are in {folder / 'winner'}, the whole status is {folder / 'status.yaml'}."
    if on_cpu:
        yield "Measured on this machine's CPU: which plan wins here says nothing about GPUs."


def _trial_line(trial: TrialStatus) -> str:
    predicted, measured = f"{trial.predicted_seconds:.4g} s", "–"
    error = f"{trial.prediction_error:+.0%}" if trial.prediction_error is not None else ""
    what = trial.summary
    if trial.measured_seconds is not None:
        measured = f"{trial.measured_seconds:.4g} s"
    if trial.state is not TrialState.SUCCEEDED:
        what = f"{what}; {trial.state}: {plain_line(trial.message or '')}"
    return f"{trial.name:<13} {predicted:>10} {measured:>10} {error:>7}  {what}"
