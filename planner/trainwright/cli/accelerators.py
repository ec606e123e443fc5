"""`trainwright accelerators`: the data sheets that profiles are estimated from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from trainwright import report
from trainwright.accelerators import data_sheet, data_sheets
from trainwright.cli.answers import Output, OutputOption, show, show_json
from trainwright.cli.command import command

app = typer.Typer(add_completion=False)


def names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [sheet.name for sheet in data_sheets() if sheet.name.startswith(incomplete)]


@app.command()
@command
def accelerators(
    name: Annotated[str | None, typer.Argument(autocompletion=names, help="Show this one, with every source.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the data sheets of accelerators, or the figures of one with their sources."""
    found = data_sheets() if name is None else (data_sheet(name),)
    if output is Output.JSON:
        show_json([asdict(sheet) for sheet in found])
    elif name is None:
        show(report.accelerator_table(found))
    else:
        show(report.sheet_lines(found[0]))
