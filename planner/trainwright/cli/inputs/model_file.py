"""Model files that commands read: documents of ours, and the `config.json` of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright import documents
from trainwright.cli.inputs.document_files import content_of
from trainwright.cli.output import note
from trainwright.hugging_face import is_config, read_config
from trainwright.training import Training, training_of

SequenceLengthOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="TOKENS", help="Tokens of a row, which a config.json of Hugging Face does not say."),
]
DecoderSequenceLengthOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="TOKENS", help="Tokens that a decoder reads, where they are not as many as the encoder's."
    ),
]


def read_training(
    path: Path, tokens: int | None, decoder_tokens: int | None = None, *, absent: Mapping[str, Any] | None = None
) -> Training:
    """Read a model file; `absent` gives the fields that it lacks. Raises ValueError with one sentence."""
    return parse_training(content_of(path), path, tokens, decoder_tokens, absent=absent)


def parse_training(
    content: bytes, path: Path, tokens: int | None, decoder_tokens: int | None, *, absent: Mapping[str, Any] | None
) -> Training:
    """Return the training of a model file's content, as `read_training` does.

    What a config.json leaves open, and what its family leaves out, goes to standard error.
    """
    data = documents.loads_plain_given(content, source=str(path))
    if not is_config(data):
        training: Training = documents.parse(data, Training, source=str(path), absent=absent)
        if tokens is not None or decoder_tokens is not None:
            raise ValueError(
                f"--sequence-length is for a config.json of Hugging Face; {path} says its own, leave it out"
            )
        return training
    if absent is None:
        raise ValueError(f"{path}: a config.json of Hugging Face has no batch; give --global-batch-size")
    model = read_config(data, tokens=tokens, decoder_tokens=decoder_tokens, source=str(path))
    if model.defaults:
        note(f"{path}: defaults of {model.architecture}: {', '.join(model.defaults)}")
    for remark in model.remarks:
        note(f"{path}: {remark}")
    return training_of(model.family, {"attention": model.attention, **absent})
