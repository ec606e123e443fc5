"""Terminal output of a plan: events, how far it is, and the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from trainwright.outside.plain_text import plain_line
from trainwright.report.progress import ProgressBar
from trainwright.report.units import seconds
from trainwright.worker_api import Progress
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import Phase, TrainingPlanStatus, TrialState, TrialStatus
from trainwright_operator.flow.actions import EmitEvent
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.local.winner import page_file, winner_folder

_QUIET: Final = (Reason.ACCEPTED, Reason.DISCOVERED, Reason.STARTING, Reason.SUSPENDED)
"""Reasons of Events that say nothing new, or for which the terminal has lines of its own."""
_OWN_WORDS: Final[dict[str, str]] = {
    Reason.WAITING_FOR_CAPACITY: "waits for another `trainwright tune`, which measures on this machine",
    Reason.IMAGE_CHANGED: "torch or the worker's code changed since this plan's first measurement, and their times are not "
    "compared; bring the former version back, or choose another --state",
    Reason.NODES_CHANGED: "the devices of this machine changed; the plan goes on with the present ones",
    Reason.RUNNING: "begun",
}
"""Sentences in place of those that speak of a cluster."""
_STEPS: Final[dict[str, str]] = {
    ConditionType.NODES_DISCOVERED: "devices",
    ConditionType.LINKS_MEASURED: "links",
    ConditionType.PROFILED: "profiles",
    ConditionType.PLANNED: "search",
    ConditionType.TRIALS_COMPLETED: "trials",
}
_BARS: Final = {
    Phase.MEASURING_LINKS: "links",
    Phase.PROFILING: "profiles",
    Phase.PLANNING: "search",
    Phase.TRYING: "trials",
}


class Terminal:
    """Lines on standard output, each with the seconds since the start, and a bar of the present step below them.

    `folder` gets the Events. `status`: what the plan has at the start, of which nothing is repeated.
    """

    def __init__(self, folder: Path, stream: TextIO, status: TrainingPlanStatus) -> None:
        self._begin, self._folder, self._stream = time.monotonic(), folder, stream
        self._bar = ProgressBar(stream, refreshes=False)  # a thread would take CPU time from what is measured
        self._ended = set(_ended_trials(status))

    def line(self, text: str) -> None:
        """Write a line."""
        self.text(f"{time.monotonic() - self._begin:6.1f} s  {text}")

    def text(self, text: str) -> None:
        """Write lines without a time."""
        self._bar.hide()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def event(self, event: EmitEvent) -> None:
        """Write an Event, and note it in the state directory."""
        message = plain_line(event.message)
        with (self._folder / "events.log").open("a", encoding="utf-8") as log:
            log.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {event.type} {event.reason}: {message}\n")
        condition, colon, words = message.partition(": ")
        if event.reason in _QUIET or (condition == ConditionType.SUCCEEDED and colon):  # that is the answer
            return
        if event.reason == Reason.RUNNING and self._stream.isatty():  # the bar shows it
            return
        own = _OWN_WORDS.get(event.reason)
        self.line(f"{_STEPS[condition]}: {own or words}" if condition in _STEPS else own or message)

    def show_ended_trials(self, status: TrainingPlanStatus) -> None:
        """Write a line for each trial that has ended."""
        for key, trial in _ended_trials(status).items():
            if key not in self._ended:
                self._ended.add(key)
                self.line(f"trial {_sentence_of_trial(trial)}")

    def show_progress(self, status: TrainingPlanStatus, of_gang: Progress | None) -> None:
        """Show how far the present step is. `of_gang`: how far the processes are that measure."""
        progress = status.progress
        if progress is None or progress.phase not in _BARS:
            return
        done, total = float(progress.done), progress.total
        if of_gang is not None and progress.phase is not Phase.MEASURING_LINKS:  # there it is counted so already
            running = sum(trial.state is TrialState.RUNNING for trial in status.trials)
            part = of_gang.done / of_gang.total if of_gang.total else 0.0
            done += part * (running if progress.phase is Phase.TRYING else 1)
        rounds = f" ({plain_line(progress.what)})" if progress.phase is Phase.MEASURING_LINKS else ""
        self._bar.show(f"{_BARS[progress.phase]}{rounds}", done, total if done or total > 1 else None)


def _ended_trials(status: TrainingPlanStatus) -> dict[tuple[str, datetime | None], TrialStatus]:
    """Return the trials that ran and ended; one of an edited plan that has a former name ended at another time."""
    return {
        (trial.name, trial.end_time): trial
        for trial in status.trials
        if trial.state.is_final and trial.state is not TrialState.SKIPPED
    }


def _sentence_of_trial(trial: TrialStatus) -> str:
    predicted = f"{trial.name}: predicted {seconds(trial.predicted_seconds)}"
    if trial.measured_seconds is None:
        return f"{predicted}; {trial.state}: {plain_line(trial.message or '')}: {trial.summary}"
    error = f" ({trial.prediction_error:+.0%})" if trial.prediction_error is not None else ""
    void = "" if trial.state is TrialState.SUCCEEDED else f"; {trial.state}: {plain_line(trial.message or '')}"
    return f"{predicted}, measured {seconds(trial.measured_seconds)}{error}: {trial.summary}{void}"


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
    if any(trial.state is TrialState.FAILED for trial in status.trials):
        yield f"What the processes of each gang wrote is in {folder / 'gangs'}."
    if status.winner is not None:
        yield f"The winner's files are in {winner_folder(folder)}, the whole status is {folder / 'status.yaml'}."
        if page_file(folder).exists():
            yield f"The answer as a page, with drawings: {page_file(folder)}"
    if on_cpu:
        yield "Measured on this machine's CPU: which plan wins here says nothing about GPUs."


def _trial_line(trial: TrialStatus) -> str:
    predicted, measured = seconds(trial.predicted_seconds), "–"
    error = f"{trial.prediction_error:+.0%}" if trial.prediction_error is not None else ""
    what = trial.summary
    if trial.measured_seconds is not None:
        measured = seconds(trial.measured_seconds)
    if trial.state is not TrialState.SUCCEEDED:
        what = f"{what}; {trial.state}: {plain_line(trial.message or '')}"
    return f"{trial.name:<13} {predicted:>10} {measured:>10} {error:>7}  {what}"
