"""Command `trainwright model`: what a model file says."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from trainwright import documents
from trainwright.cli.framework import command
from trainwright.cli.inputs.document_files import content_of
from trainwright.cli.inputs.model_file import DecoderSequenceLengthOption, SequenceLengthOption, parse_training
from trainwright.cli.output import Format, Output, OutputOption, note, show, show_document, show_json
from trainwright.families.fields import Doc, check_most, field_types
from trainwright.families.resource_names import in_resource_names
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
    content = content_of(file)
    batch = {"global_batch_size": global_batch_size}
    training = parse_training(content, file, sequence_length, decoder_sequence_length, absent=batch)
    if document:
        show_document(
            training,
            Format.JSON if output is Output.JSON else Format.YAML,
            comment=f"{file}, read by `trainwright model`",
        )
        return
    if training_plan:
        manifest = _manifest(training, file, content)
        if output is Output.JSON:
            show_json(manifest)
        else:
            typer.echo(yaml.safe_dump(manifest, sort_keys=False, width=120), nl=False)
        return
    if training.dtype is RequestedDtype.AUTO:
        training = training.in_format(Dtype.BFLOAT16)
    reading = ModelReading.of(training.model, training.optimizer)
    if output is Output.JSON:
        show_json({**asdict(reading), "family": documents.dump(training)[training.family.family]})
    else:
        show(reading_table(reading, f"{file}: {training.family.family}"))


def _manifest(training: Training, file: Path, content: bytes) -> dict[str, Any]:
    """Return the TrainingPlan of a training; its annotation says of which file the fields are.

    Raises ValueError for a field that is above what a TrainingPlan holds.
    """
    family = training.family
    try:
        check_most(family)
    except ValueError as error:
        raise ValueError(f"{file}: a TrainingPlan does not hold this model: {error}") from None
    written = documents.dump(training)[family.family]
    not_offered = {
        name
        for name, hint in field_types(type(family)).items()
        if any(isinstance(part, Doc) and not part.is_offered for part in get_args(hint))
    }
    given = {}
    for field in fields(family):
        if field.name == "family" or getattr(family, field.name) in (None, field.default):
            continue
        if field.name in not_offered:
            note(f"{field.name} of the model is left out: a TrainingPlan has none")
        else:
            given[field.name] = written[field.name]
    return {
        "apiVersion": "trainwright.dev/v1alpha1",
        "kind": "TrainingPlan",
        "metadata": {
            "name": re.sub("[^a-z0-9]+", "-", file.stem.lower()).strip("-") or "model",
            "annotations": {
                "trainwright.dev/model-source": f"{file.name} sha256:{hashlib.sha256(content).hexdigest()[:12]}"
            },
        },
        "spec": {
            "model": in_resource_names({family.family: given}),
            "training": {"globalBatchSize": training.global_batch_size},
        },
    }
