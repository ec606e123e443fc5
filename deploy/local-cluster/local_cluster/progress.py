"""Progress on the screen: a bar for each step on a terminal, else a line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


@dataclass(slots=True)
class Step:
    """Step in progress; `advance` moves its bar if its length is known."""

    name: str
    _progress: Progress | None
    _task: TaskID | None
    _console: Console
    _started_seconds: float

    def advance(self, note: str | None = None) -> None:
        """Record one finished unit, named by `note`."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)
            if note is not None:
                self._progress.update(self._task, note=note)
        elif note is not None:
            elapsed = time.monotonic() - self._started_seconds
            self._console.print(f"    {note} ({elapsed:.1f} s)", highlight=False)


class Steps:
    """Thread-safe display of steps, also of parallel ones."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    @contextmanager
    def shown(self) -> Iterator[Steps]:
        if not self._console.is_terminal:
            yield self
            return
        columns = (
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            self._progress = progress
            try:
                yield self
            finally:
                self._progress = None

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Step]:
        """Show a step; `total` is its number of units if known."""
        started_seconds = time.monotonic()
        task = None
        if self._progress is not None:
            task = self._progress.add_task(name, total=total, note="")
        else:
            self._console.print(f"· {name}", highlight=False)
        yield Step(name, self._progress, task, self._console, started_seconds)
        if self._progress is not None and task is not None:
            self._progress.update(task, total=total or 1, completed=total or 1, note="")
        else:
            elapsed = time.monotonic() - started_seconds
            self._console.print(f"✓ {name} [dim]{elapsed:.1f} s[/dim]", highlight=False)
