"""Commands `trainwright accelerators`, `machines`, `cluster` and `runtimes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trainwright import documents
from trainwright.accelerators import data_sheet, data_sheets, has_data_sheet
from trainwright.accelerators import machine as known_machine
from trainwright.accelerators import machines as known_machines
from trainwright.accelerators.described_machines import (
    EXAMPLE,
    NETWORK_EXAMPLE,
    DescribedNode,
    network_port,
    nodes_in_words,
    priced_nodes,
)
from trainwright.accelerators.machines import PricedNode, cluster_of_nodes
from trainwright.cli.framework import command, load_module
from trainwright.cli.inputs.document_files import content_of
from trainwright.cli.output import Format, FormatOption, Output, OutputOption, note, show, show_document, show_json
from trainwright.cli.watch import PACKAGE, REMEDY
from trainwright.report.listings.hardware_tables import accelerator_table, machine_table, sheet_lines
from trainwright.report.listings.preset_tables import preset_lines, preset_table
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
        list[str] | None,
        typer.Argument(
            metavar="MACHINE=COUNT…",
            autocompletion=machine_names,
            help="For example p3.8xlarge=3 g4dn.12xlarge=1; `trainwright machines` lists the names. Or a machine in words, "
            f"NAME=DEVICESxACCELERATOR/LINK: {EXAMPLE}, or h100=4x8xH100 for four of 8 H100.",
        ),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="NODES.json",
            help="Nodes that `kubectl get nodes --output json` prints, or with nodes,resourceslices,deviceclasses what drivers "
            "publish of them; - for standard input.",
        ),
    ] = None,
    discover: Annotated[
        bool, typer.Option("--discover", help="The GPUs of this machine and their links, by nvidia-smi.")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help=f"Network between machines whose own is not listed, in one direction: {NETWORK_EXAMPLE}.",
        ),
    ] = None,
    output: FormatOption = Format.YAML,
) -> None:
    """Write a cluster document from machines by name or in words, from Kubernetes' nodes or this machine's GPUs.

    Links and prices come from data sheets, memory from what nodes report.
    """
    sources = {"machines": bool(machine), "--from": nodes is not None, "--discover": discover}
    *others, last = [name for name, is_given in sources.items() if is_given] or [""]
    if others:
        raise ValueError(f"give one of {', '.join(others)} and {last}, not {'both' if len(others) == 1 else 'several'}")
    if not last:
        raise ValueError("give machines, for example p3.8xlarge=3, or --from, or --discover")
    port = None if network is None else network_port(network)
    if machine:
        placed = nodes_in_words(machine, port)
    else:
        described, remarks = _discovered(nodes)
        placed = priced_nodes(described, port)
        for sentence in remarks:
            note(sentence)
    document = cluster_of_nodes(placed)
    _note_missing(placed)
    show_document(document, output, comment="Links and prices are from data sheets, not measured.")


def _discovered(nodes: Path | None) -> tuple[Sequence[DescribedNode], Sequence[str]]:
    """Return the nodes of a list, or of this machine, and sentences on what is left out or assumed."""
    described: tuple[Sequence[DescribedNode], Sequence[str]]
    if nodes is None:
        described = load_module(f"{PACKAGE}.local.described_machine", (PACKAGE,), REMEDY).describe_machine()
    else:
        listed = documents.loads_plain_given(content_of(nodes), source=str(nodes))
        try:
            described = load_module(f"{PACKAGE}.described_nodes", (PACKAGE,), REMEDY).describe_list(listed)
        except ValueError as error:
            raise ValueError(f"{nodes}: {error}") from None
    return described


def _note_missing(nodes: Sequence[PricedNode]) -> None:
    """Note accelerators of which only some nodes have a price, and those without a data sheet."""
    priced = {each.node.accelerator for each in nodes if each.price_per_hour is not None}
    unpriced = {each.node.accelerator: each.machine or each.node.name for each in nodes if each.price_per_hour is None}
    for accelerator, name in unpriced.items():
        if accelerator in priced:
            note(
                f"{accelerator} has no price in this cluster, since {name} has none; --objective cost needs price_per_hour of "
                "it, US dollars for one device"
            )
    for accelerator in dict.fromkeys(each.node.accelerator for each in nodes):
        if not has_data_sheet(accelerator):
            note(
                f"{accelerator} has no data sheet: its links are taken for PCIe 3.0, and plans need its measured profiles"
            )


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
