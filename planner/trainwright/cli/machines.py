"""`trainwright machines`: which machines there are data sheets of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from trainwright import report
from trainwright.accelerators import machine
from trainwright.accelerators import machines as known_machines
from trainwright.cli.answers import Output, OutputOption, show, show_json
from trainwright.cli.command import command

app = typer.Typer(add_completion=False)


def names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [sheet.name for sheet in known_machines() if sheet.name.startswith(incomplete)]


@app.command()
@command
def machines(
    name: Annotated[str | None, typer.Argument(autocompletion=names, help="Show this one, with every source.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the machines that `cluster` knows, or the figures of one with their sources."""
    found = known_machines() if name is None else (machine(name),)
    if output is Output.JSON:
        show_json([asdict(sheet) for sheet in found])
    elif name is None:
        show(report.machine_table(found))
    else:
        show(report.sheet_lines(found[0]))
