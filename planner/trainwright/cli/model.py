"""Command `trainwright model`: what a model file says."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from pydantic.alias_generators import to_camel

from trainwright import documents
from trainwright.cli.document_files import content_of
from trainwright.cli.framework import command
from trainwright.cli.model_file import DecoderSequenceLengthOption, SequenceLengthOption, read_training
from trainwright.cli.options import ANY_BATCH
from trainwright.cli.output import Format, Output, OutputOption, note, show, show_document, show_json
from trainwright.families.fields import Doc, field_types
from trainwright.layer import Dtype
from trainwright.report.model_reading import ModelReading, reading_table
from trainwright.training import RequestedDtype, Training

app = typer.Typer(add_completion=False)


@app.command()
@command
def model(  # noqa: PLR0913 (options)
    file: Annotated[Path, typer.Argument(help="Model file, or a config.json of Hugging Face; `-`: standard input.")],
    *,
    sequence_length: SequenceLengthOption = None,
    decoder_sequence_length: DecoderSequenceLengthOption = None,
    global_batch_size: Annotated[
        int, typer.Option(min=1, metavar="ROWS", help="Rows of one iteration, where the file has none.")
    ] = 1,
    document: Annotated[
        bool, typer.Option("--document", help="Write a model file of ours with the family's fields.")
    ] = False,
    training_plan: Annotated[
        bool, typer.Option("--training-plan", help="Write the manifest of a TrainingPlan with the family's fields.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the parameters of a model by part, its FLOPs and the bytes of its training state."""
    if document and training_plan:
        raise ValueError("give --document or --training-plan, not both")
    batch = {**ANY_BATCH, "global_batch_size": global_batch_size}
    training = read_training(file, sequence_length, decoder_sequence_length, absent=batch)
    if document or training_plan:
        if document:
            show_document(training, Format.YAML, comment=f"{file}, read by `trainwright model`")
        else:
            typer.echo(yaml.safe_dump(_manifest(training, file), sort_keys=False, width=120), nl=False)
        return
    if training.dtype is RequestedDtype.AUTO:
        training = training.in_format(Dtype.BFLOAT16)
    reading = ModelReading.of(training.model, training.optimizer)
    if output is Output.JSON:
        show_json(
            asdict(reading)
            | {"family": documents.dump(training)[training.family.family], "state_bytes": reading.state_bytes}
        )
    else:
        show(reading_table(reading, f"{file}: {training.family.family}"))


def _manifest(training: Training, file: Path) -> dict[str, Any]:
    """Return the TrainingPlan of a training; its annotation says which file the fields are of."""
    family = training.family
    types, left_out = field_types(type(family)), {"family"}
    left_out |= {
        name for name, hint in types.items() for note in get_args(hint) if isinstance(note, Doc) and not note.is_offered
    }
    for name in sorted(left_out & {field.name for field in fields(family) if getattr(family, field.name) is True}):
        note(f"{name} of the model is left out: a TrainingPlan has none")
    given = {
        to_camel(field.name): getattr(family, field.name)
        for field in fields(family)
        if field.name not in left_out and getattr(family, field.name) not in (None, field.default)
    }
    digest = hashlib.sha256(content_of(file)).hexdigest()[:12]
    return {
        "apiVersion": "trainwright.dev/v1alpha1",
        "kind": "TrainingPlan",
        "metadata": {
            "name": re.sub("[^a-z0-9]+", "-", file.stem.lower()).strip("-") or "model",
            "annotations": {"trainwright.dev/model-source": f"{file.name} sha256:{digest}"},
        },
        "spec": {
            "model": {to_camel(family.family): given},
            "training": {"globalBatchSize": training.global_batch_size},
        },
    }
