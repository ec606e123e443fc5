"""`trainwright bench papers`: the published tables of AMP and Galvatron-BMW, rebuilt beside what they print."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from trainwright.bench.comparison import Comparison, Grid, Tell
from trainwright.bench.papers import TABLES, rebuilt
from trainwright.cli.answers import Output, OutputOption, show, show_json
from trainwright.cli.command import command
from trainwright.report.tables import add_row, new_table, titled

app = typer.Typer(add_completion=False, help="Rebuild the tables of the papers.", invoke_without_command=True)


def table_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in TABLES if name.startswith(incomplete)]


@app.callback()
def _without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        context.get_help()


@app.command()
@command
def papers(
    table: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=table_names, metavar="NAME", help=f"Only this table; again for more. {', '.join(TABLES)}."
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Rebuild the tables of AMP and Galvatron-BMW from data sheets, beside the published figures. All takes minutes."""
    with _watched(table or list(TABLES)) as tell:
        if output is Output.JSON:
            documents = [comparison.document() for comparison in rebuilt(table or (), tell)]
            show_json({"origin": "estimated", "tables": documents})
            return
        for comparison in rebuilt(table or (), tell):
            show(*_shown(comparison))


@contextmanager
def _watched(names: list[str]) -> Iterator[Tell]:
    """A bar on standard error where somebody watches: tables done, and the share of the one at work."""
    if not sys.stderr.isatty():
        yield lambda _what, _share: None
        return
    columns = (
        BarColumn(bar_width=28),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(names))
        done, last = 0, 0.0

        def tell(what: str, share: float) -> None:
            nonlocal done, last
            done += share < last
            last = share
            bar.update(task, completed=done + share, description=what)

        yield tell


def _shown(comparison: Comparison) -> Iterator[Any]:
    yield Text(f"{comparison.title} (ours estimated)", style="bold underline")
    for grid in comparison.grids:
        yield Text()
        yield _grid(grid)
    for note in comparison.notes:
        yield Padding(Text(f"• {note}"), (0, 0, 0, 1))
    yield Text()


def _grid(grid: Grid) -> Any:
    table = new_table([(heading, "left" if place == 0 else "right") for place, heading in enumerate(grid.headings)])
    for row in grid.rows:
        add_row(table, *row)
    return titled(grid.title, table)
