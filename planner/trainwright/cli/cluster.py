"""`trainwright cluster`: a cluster document from machines by name."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.accelerators import cluster_of, machines
from trainwright.cli.answers import Format, FormatOption, show_document
from trainwright.cli.command import command

app = typer.Typer(add_completion=False)


def machine_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [f"{machine.name}=" for machine in machines() if machine.name.startswith(incomplete)]


@app.command()
@command
def cluster(
    machine: Annotated[
        list[str],
        typer.Argument(
            metavar="MACHINE=COUNT…",
            autocompletion=machine_names,
            help="For example p3.8xlarge=3 g4dn.12xlarge=1; `trainwright machines` lists the names.",
        ),
    ],
    output: FormatOption = Format.YAML,
) -> None:
    """Write a cluster document from machines by name and number, with links and prices from their data sheets."""
    counts: dict[str, int] = {}
    for given in machine:
        name, number = _counted(given)
        counts[name] = counts.get(name, 0) + number
    show_document(cluster_of(counts), output, comment="Links and prices come from data sheets, they are not measured.")


def _counted(given: str) -> tuple[str, int]:
    name, _, number = given.partition("=")
    if not name or not number.isascii() or not number.isdigit() or len(number) > 4:
        raise ValueError(f"expected a machine and how many of it, up to 9999, for example p3.8xlarge=3, got {given!r}")
    return name, int(number)
