"""`trainwright profiles`: layer profiles from other tools' tables, from data sheets, from several files."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainwright.accelerators import best_format
from trainwright.answer.question import check_model_size, estimate_from_data_sheets
from trainwright.cli.framework import command
from trainwright.cli.inputs.document_files import read
from trainwright.cli.inputs.model_file import SequenceLengthOption, read_training
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.cli.options import ANY_BATCH, runtime_of
from trainwright.cli.output import note, write_document
from trainwright.cluster import Cluster, Port
from trainwright.profile_imports import FORMATS, ImportOptions
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles
from trainwright.training import RequestedDtype, Training

app = typer.Typer(add_completion=False, help="Import, estimate or merge layer profiles.", invoke_without_command=True)

MAX_ESTIMATED_DEGREE = 64
"""Maximum tensor degree to estimate where no cluster limits it."""

ModelFile = Annotated[Path, typer.Option("--model", help="The model that the layers belong to.")]
TargetFile = Annotated[
    Path | None, typer.Option("--write", help="Write into this file, not to standard output."), WRITTEN
]


def format_names(incomplete: str) -> list[str]:
    """Complete a format's name in the shell."""
    return [name for name in FORMATS if name.startswith(incomplete)]


@dataclass(frozen=True)
class TableOptions:
    """Options for what the tables do not state."""

    accelerator: Annotated[str, typer.Option(help="Accelerator that was measured, named as in the cluster document.")]
    inside_bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES/S",
            help="Bandwidth between the measured devices, to subtract all-reduces from times at tensor degrees above 1.",
        ),
    ] = None
    inside_latency: Annotated[float, typer.Option(metavar="SECONDS", help="The latency of that link.")] = 1e-5
    inside_curves: Annotated[
        Path | None,
        typer.Option(help="sailor: its bandwidths inside a machine by message size, instead of --inside-bandwidth."),
    ] = None
    entry: Annotated[
        str,
        typer.Option(
            metavar="NAME/…", help="sailor: model and accelerator to read from a merged file, as OPT-350/A100-40."
        ),
    ] = ""
    memory_table: Annotated[
        Path | None, typer.Option(help="sailor: its layers.json, with activation and parameter bytes.")
    ] = None
    blocks: Annotated[
        str, typer.Option(metavar="FROM:TO,…", help="amp: entries that are the model's tensor-parallel layers.")
    ] = ""
    tensor_degrees: Annotated[
        str,
        typer.Option(metavar="DEGREE,…", help="amp: tensor degree of each file, if the file names do not end with it."),
    ] = ""

    @property
    def options(self) -> ImportOptions:
        bandwidth = self.inside_bandwidth
        if not math.isfinite(self.inside_latency + (bandwidth or 0.0)):
            raise ValueError(
                f"--inside-bandwidth and --inside-latency must be finite, got {bandwidth} bytes/s and "
                f"{self.inside_latency} s"
            )
        return ImportOptions(
            inside=None if bandwidth is None else Port(self.inside_latency, bandwidth),
            memory_table=self.memory_table,
            inside_curves=self.inside_curves,
            entry=tuple(part for part in self.entry.split("/") if part),
            tell=note,
            blocks=tuple(_range(part) for part in self.blocks.split(",") if part),
            tensor_degrees=tuple(_number(part, "--tensor-degrees") for part in self.tensor_degrees.split(",") if part),
        )


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    return _number(first, "--blocks"), _number(end, "--blocks")


def _number(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option}: expected a whole number, got {text!r}") from None


@app.callback()
def _without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


@app.command("import")
@command
def import_tables(  # noqa: PLR0913 (options)
    *,
    tables: Annotated[list[Path], typer.Argument(metavar="TABLE…", help="The files that hold the measurements.")],
    table_format: Annotated[
        str,
        typer.Option("--format", autocompletion=format_names, metavar="|".join(FORMATS), help="Format of the tables."),
    ],
    model: ModelFile,
    sequence_length: SequenceLengthOption = None,
    more: TableOptions,
    write: TargetFile = None,
) -> None:
    """Turn another tool's layer tables into a profiles document, on standard output."""
    if table_format not in FORMATS:
        raise ValueError(f"unknown format {table_format!r}; choose one of {', '.join(FORMATS)}")
    training = _training(model, sequence_length, [more.accelerator])
    profiles = FORMATS[table_format](tables, model=training.model, accelerator=more.accelerator, options=more.options)
    write_document(profiles, write)


@app.command("estimate")
@command
def estimate_from_sheets(  # noqa: PLR0913 (options)
    *,
    model: ModelFile,
    sequence_length: SequenceLengthOption = None,
    cluster: Annotated[Path | None, typer.Option(help="Estimate for the accelerators of this cluster.")] = None,
    accelerator: Annotated[
        list[str] | None, typer.Option(help="Estimate for this accelerator; may be repeated.")
    ] = None,
    runtime: Annotated[
        Path | None,
        typer.Option(metavar="NAME|FILE", help="Training runtime whose kernels they are: a preset or a file."),
    ] = None,
    write: TargetFile = None,
) -> None:
    """Estimate layer profiles from accelerators' data sheets, without measuring anything."""
    names = list(accelerator or ())
    devices, power_watts = MAX_ESTIMATED_DEGREE, dict[str, float]()
    if cluster is not None:
        given: Cluster = read(cluster, Cluster)
        names += [node.accelerator for node in given.nodes]
        devices, power_watts = len(given.devices), given.power_limits
    if not names:
        raise ValueError("nothing to estimate for: give --cluster or --accelerator")
    profiles = estimate_from_data_sheets(
        _training(model, sequence_length, names),
        tuple(dict.fromkeys(names)),
        devices=devices,
        runtime=runtime_of(runtime),
        power_watts=power_watts,
    )
    note("these profiles are estimated from data sheets, not measured")
    write_document(profiles, write)


@app.command("merge")
@command
def merge(
    *,
    files: Annotated[list[Path], typer.Argument(metavar="PROFILES…", help="Profiles documents, the best first.")],
    write: TargetFile = None,
) -> None:
    """Merge several profiles documents; a point of several of them is taken from the first.

    So is what did not fit: where an earlier file has measured as many rows, or more, it did.
    """
    points: dict[tuple[str, str, int, int], LayerProfile] = {}
    too_large: dict[LayerTooLarge, None] = {}
    fitted: dict[tuple[str, str, int], int] = {}  # maximum row count that an earlier file measured
    origins: set[str] = set()
    for file in files:
        given: Profiles = read(file, Profiles)
        origins.add(given.origin)
        too_large.update(
            dict.fromkeys(large for large in given.too_large if large.rows > fitted.get(_series(large), 0))
        )
        for layer in given.layers:
            points.setdefault((*_series(layer), layer.rows), layer)
        for layer in given.layers if given.origin == "measured" else ():
            fitted[_series(layer)] = max(layer.rows, fitted.get(_series(layer), 0))
    origin: Literal["measured", "estimated"] = "estimated" if "estimated" in origins else "measured"
    if len(origins) > 1:
        note("some of these profiles are estimated, so the whole document is marked so")
    write_document(Profiles(tuple(points.values()), origin, tuple(too_large)), write)


def _series(layer: LayerProfile | LayerTooLarge) -> tuple[str, str, int]:
    return layer.accelerator, layer.kind, layer.tensor_degree


def _training(file: Path, tokens: int | None, accelerators: Collection[str]) -> Training:
    """Read a model, whose file may lack a batch, in the best format of the accelerators if it leaves that open."""
    training = read_training(file, tokens, absent=ANY_BATCH)
    if training.dtype is RequestedDtype.AUTO:
        training = training.in_format(best_format(accelerators))
        note(
            f"dtype auto: taken as {training.dtype}, the fastest that {', '.join(dict.fromkeys(accelerators))} computes"
        )
    check_model_size(training)
    return training
