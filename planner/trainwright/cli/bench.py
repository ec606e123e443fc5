"""`trainwright bench`: figures of papers and of published runs, from the package `trainwright_papers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.cli.framework import command, load_module
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.cli.output import Output, OutputOption

PACKAGE = "trainwright_papers"
REMEDY = "install trainwright from its source with `pip install .`, or run `make venv`"

app = typer.Typer(add_completion=False, help="Compare estimates with published figures.", invoke_without_command=True)


def _load(module: str) -> Any:
    return load_module(f"{PACKAGE}.{module}", (PACKAGE,), REMEDY)


def complete_table_name(incomplete: str) -> list[str]:
    """Complete a table's name in the shell."""
    return [name for name in _table_names() if name.startswith(incomplete)]


def _table_names() -> list[str]:
    try:
        return list(_load("tables").TABLES)
    except ValueError:
        return []  # help and completion work without the package


def _table_help() -> str:
    names = _table_names()
    return "Only this table; may be repeated." + (f" {', '.join(names)}." if names else "")


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
            autocompletion=complete_table_name,
            metavar="NAME",
            help=_table_help(),
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Rebuild the tables of AMP and Galvatron-BMW from data sheets, next to the published figures, and plan the models of Alpa's.

    All tables take minutes, Wide-ResNet's the most.
    """
    _load("report").print_tables(table or (), output)


@app.command()
@command
def published(
    table: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE", help="CSV of measured throughputs; docs/accuracy.md names its columns. May be repeated."
        ),
    ],
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML of models' sizes, before those known by name; docs/accuracy.md has its form."
        ),
    ] = None,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="Test the error bands on each source by those that the others make.")
    ] = False,
    write_bands: Annotated[
        Path | None,
        typer.Option(help="Write the errors by framework and generation as error_bands.json has them."),
        WRITTEN,
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Estimate published runs from data sheets alone, next to what was measured: by source, GPU and kind of plan."""
    _load("report").print_published(table, models, output, write_bands, leave_out=leave_out)
