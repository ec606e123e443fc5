"""Commands `trainwright accelerators`, `machines`, `cluster` and `runtimes`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from trainwright.accelerators import cluster_of, data_sheet, data_sheets
from trainwright.accelerators import machine as known_machine
from trainwright.accelerators import machines as known_machines
from trainwright.cli.framework import command
from trainwright.cli.output import Format, FormatOption, Output, OutputOption, note, show, show_document, show_json
from trainwright.report.hardware_tables import accelerator_table, machine_table, sheet_lines
from trainwright.report.preset_tables import preset_lines, preset_table
from trainwright.runtime_presets import runtime_preset, runtime_presets

app = typer.Typer(add_completion=False)


def accelerator_names(incomplete: str) -> list[str]:
    """Complete the name in the shell."""
    return [sheet.name for sheet in data_sheets() if sheet.name.startswith(incomplete)]


@app.command()
@command
def accelerators(
    name: Annotated[
        str | None, typer.Argument(autocompletion=accelerator_names, help="Accelerator to show, with every source.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the data sheets of accelerators, or the figures of one with their sources."""
    sheets = data_sheets() if name is None else (data_sheet(name),)
    if output is Output.JSON:
        show_json([{**asdict(sheet), **asdict(sheet.generation_sheet)} for sheet in sheets])
    elif name is None:
        show(accelerator_table(sheets))
    else:
        show(sheet_lines(sheets[0]), wraps=False)


def preset_names(incomplete: str) -> list[str]:
    """Complete a preset's name in the shell."""
    return [name for name in runtime_presets() if name.startswith(incomplete)]


@app.command()
@command
def runtimes(
    name: Annotated[
        str | None, typer.Argument(autocompletion=preset_names, help="Preset to show, with the source of every fact.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the presets of training runtimes that `--runtime` takes, or the facts of one with their sources."""
    presets = runtime_presets() if name is None else {name: runtime_preset(name)}
    if output is Output.JSON:
        show_json({key: asdict(preset) for key, preset in presets.items()})
    elif name is None:
        show(preset_table(presets))
    else:
        show(preset_lines(name, presets[name]), wraps=False)


def machine_names(incomplete: str) -> list[str]:
    """Complete the name in the shell."""
    return [f"{machine.name}=" for machine in known_machines() if machine.name.startswith(incomplete)]


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
    machine_of_name = {name: known_machine(name) for name in counts}
    priced = {sheet.accelerator for sheet in machine_of_name.values() if sheet.price_per_hour is not None}
    for name, sheet in machine_of_name.items():
        if sheet.price_per_hour is None and sheet.accelerator in priced:
            note(
                f"{sheet.accelerator} has no price in this cluster, since {name} has none; --objective cost needs price_per_hour of "
                "it, US dollars for one device"
            )
    show_document(cluster_of(counts), output, comment="Links and prices are from data sheets, not measured.")


def _counted(given: str) -> tuple[str, int]:
    name, _, number = given.partition("=")
    if not name or not number.isascii() or not number.isdigit() or len(number) > 4:
        raise ValueError(f"expected MACHINE=COUNT with a count up to 9999, for example p3.8xlarge=3, got {given!r}")
    return name, int(number)


def known_machine_names(incomplete: str) -> list[str]:
    """Complete the name in the shell."""
    return [sheet.name for sheet in known_machines() if sheet.name.startswith(incomplete)]


@app.command()
@command
def machines(
    name: Annotated[
        str | None, typer.Argument(autocompletion=known_machine_names, help="Machine to show, with every source.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the machines that `cluster` knows, or the figures of one with their sources."""
    listed = known_machines() if name is None else (known_machine(name),)
    if output is Output.JSON:
        show_json([asdict(sheet) for sheet in listed])
    elif name is None:
        show(machine_table(listed))
    else:
        show(sheet_lines(listed[0]), wraps=False)
