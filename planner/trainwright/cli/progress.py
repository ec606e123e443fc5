"""A bar on standard error while a search runs, where somebody watches."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from trainwright.cli.inputs import SearchOptions
from trainwright.report import Gaps
from trainwright.search import Control, Problem
from trainwright.search import Progress as Step

_USUAL_PROOF_SECONDS = 20.0


@contextmanager
def watched(what: str, search: SearchOptions) -> Iterator[Control]:
    """The control of a search; on a terminal its progress is shown, and gone when it ends."""
    if search.budget_seconds is not None and not search.budget_seconds >= 0:  # NaN, too
        raise ValueError(f"--budget-seconds must be at least 0, got {search.budget_seconds}")
    if search.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {search.seed}")
    _keep_imports()
    if not sys.stderr.isatty():
        yield Control.within(search.budget_seconds, seed=search.seed, effort=search.effort)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=28),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, best="")

        def report(step: Step) -> None:
            best = "" if step.best_seconds is None else f"best {step.best_seconds:.4g} s"
            bar.update(task, completed=step.done, total=step.total, best=best)

        yield Control.within(search.budget_seconds, seed=search.seed, report=report, effort=search.effort)


@contextmanager
def proving(problem: Problem, search: SearchOptions) -> Iterator[Gaps]:
    """What no plan can beat, with the search's effort, or less where it has a budget; a terminal shows that it is sought."""
    budget = search.budget_seconds
    effort = search.effort if budget is None else min(search.effort, budget / _USUAL_PROOF_SECONDS)
    with Console(stderr=True).status("proving how much faster a plan could be"):
        yield Gaps(problem, effort)


@cache
def _keep_imports() -> None:
    """What imports made stays: collections that walk through all of it take a tenth of a quick search. Once a process."""
    gc.freeze()
