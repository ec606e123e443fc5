"""Bar of a step that takes long, on a terminal: how far it is, and about how long it still takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from trainwright.report.units import duration


class ProgressBar:
    """Bar of the present step below what a terminal shows; elsewhere it shows nothing.

    Where it `refreshes`, a thread draws it ten times a second; else every `show` draws it.
    """

    def __init__(self, stream: TextIO, *, refreshes: bool = True) -> None:
        console = Console(file=stream)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            _TimeLeft(),
            TextColumn("{task.fields[remark]}", markup=False),
            console=console,
            transient=True,
            auto_refresh=refreshes,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not (stream.isatty() and console.is_interactive),  # FORCE_COLOR alone makes no terminal
        )
        self._refreshes = refreshes
        self._step: tuple[str, TaskID] | None = None

    def show(self, what: str, done: float, total: float | None, remark: str = "") -> None:
        """Show how far a step is; another step begins a new bar. `total`: None where it is not known."""
        if self._progress.disable:
            return
        if self._step is None or self._step[0] != what:
            if self._step is not None:
                self._progress.remove_task(self._step[1])
            self._step = what, self._progress.add_task(what, total=total, remark=remark, first=done)
        self._progress.start()
        self._progress.update(self._step[1], completed=done, total=total, remark=remark)
        if not self._refreshes:
            self._progress.refresh()

    def hide(self) -> None:
        """Remove the bar, so that lines can be written; `show` brings it back with its times."""
        if not self._progress.disable:
            self._progress.stop()


class _TimeLeft(ProgressColumn):
    """Estimate of the time that is left, by the mean speed of the step since it is shown: rich asks for two steps first."""

    def render(self, task: Task) -> Text:
        done = task.completed - task.fields["first"]
        if not task.remaining or done <= 0 or task.elapsed is None:
            return Text()
        return Text(f"about {duration(task.elapsed * task.remaining / done)} left", style="progress.remaining")


class Report(Protocol):
    """Callback with what is done, the total, and a remark."""

    def __call__(self, done: float, total: float | None, remark: str = "") -> None: ...


@contextmanager
def progress_bar(what: str, stream: TextIO) -> Iterator[Report]:
    """Yield the callback of a bar that is there until the end of the block."""
    bar = ProgressBar(stream)
    bar.show(what, 0, None)
    try:
        yield partial(bar.show, what)
    finally:
        bar.hide()
