"""Output of `trainwright bench`: tables for the terminal, JSON for programs, a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from trainwright.cli.output import Output, show, show_json
from trainwright.report.tables import add_row, new_table, titled
from trainwright_papers.comparison import Comparison, Grid, ReportProgress
from trainwright_papers.published_agreement import published_comparison
from trainwright_papers.published_bands import bands_of
from trainwright_papers.published_models import read_models
from trainwright_papers.published_scores import scored_table
from trainwright_papers.tables import TABLES, rebuild_tables


def print_tables(names: Sequence[str], output: Output) -> None:
    """Rebuild and print the named tables, or all of them if `names` is empty."""
    with _progress_bar(len(names) or len(TABLES)) as report_progress:
        if output is Output.JSON:
            documents = [comparison.document() for comparison in rebuild_tables(names, report_progress)]
            show_json({"origin": "estimated", "tables": documents})
            return
        for comparison in rebuild_tables(names, report_progress):
            show(*_render(comparison))


def print_published(
    tables: Sequence[Path], models: Path | None, output: Output, write_bands: Path | None, *, leave_out: bool = False
) -> None:
    """Estimate the rows of tables of published throughputs, print them with their agreement, and write error bands."""
    names = read_models(models)
    with _progress_bar(1) as report_progress:
        scored = scored_table(tables, names, report_progress)
    comparison = published_comparison(scored, leave_out=leave_out)
    if write_bands is not None:
        bands = ",\n".join(f"  {json.dumps(asdict(band))}" for band in bands_of(scored.rows))
        write_bands.write_text(f"[\n{bands}\n]\n", encoding="utf-8")
    if output is Output.JSON:
        show_json(comparison.document() | {"origin": "estimated"})
    else:
        show(*_render(comparison))


@contextmanager
def _progress_bar(tables: int) -> Iterator[ReportProgress]:
    """Show finished tables and the share of the current one, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _description, _share: None
        return
    columns = (
        BarColumn(bar_width=28),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=tables)
        finished, last_share = 0, 0.0

        def report_progress(description: str, share: float) -> None:
            nonlocal finished, last_share
            finished += share < last_share  # the share starts again at zero with every table
            last_share = share
            bar.update(task, completed=finished + share, description=description)

        yield report_progress


def _render(comparison: Comparison) -> Iterator[RenderableType]:
    yield Text(f"{comparison.title} (ours estimated)", style="bold underline")
    for grid in comparison.grids:
        yield Text()
        yield _render_grid(grid)
    for note in comparison.notes:
        yield Padding(Text(f"• {note}"), (0, 0, 0, 1))
    yield Text()


def _render_grid(grid: Grid) -> RenderableType:
    table = new_table([(heading, "right" if column else "left") for column, heading in enumerate(grid.headings)])
    for row in grid.rows:
        add_row(table, *row)
    return titled(grid.title, table)
