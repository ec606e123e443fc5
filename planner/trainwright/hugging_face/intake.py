"""Reading of a `config.json` as a family, or as one sentence on what no family has."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainwright.families import T5, Family
from trainwright.families.fields import check_most
from trainwright.hugging_face.architectures import ARCHITECTURES, WITHOUT_FAMILY
from trainwright.hugging_face.config import OTHERWISE, Config
from trainwright.layer import Attention

_NEAREST: Final = (
    ("moe_intermediate_size", "moe", "qwen3_moe"), ("num_local_experts", "moe", "mixtral"),
    ("num_experts", "moe", "mixtral"), ("n_routed_experts", "moe", "mixtral"), ("is_encoder_decoder", "t5", "t5"),
    ("num_decoder_layers", "t5", "t5"),
    ("patch_size", "vit", "vit"), ("type_vocab_size", "bert", "bert"), ("rms_norm_eps", "llama", "llama"),
)  # fmt: skip
"""Keys by which an unknown model is near a family, in order, with the known model type that its keys are compared to."""


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """Model of a `config.json`.

    Attributes:
        family: the family's fields.
        architecture: class of transformers.
        defaults: keys that the file leaves out, with their values.
        remarks: what the family leaves out, each in a sentence.
        attention: implementation that it trains with.
    """

    family: Family
    architecture: str
    defaults: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    attention: Attention = Attention.FUSED


def is_config(data: Any) -> bool:
    """Return whether plain data is a `config.json` of Hugging Face."""
    return isinstance(data, Mapping) and ("model_type" in data or "architectures" in data)


def read_config(
    keys: Mapping[str, Any],
    *,
    tokens: int | None = None,
    decoder_tokens: int | None = None,
    source: str = "config.json",
) -> HuggingFaceModel:
    """Return the family of a `config.json`.

    Args:
        keys: of the file.
        tokens: of a sequence, which the file does not say; images need none.
        decoder_tokens: of the decoder's sequences; by default as many.
        source: name of the file in sentences.

    Raises ValueError with one sentence for what no family has, and for what the file lacks.
    """
    model_type, head = _class_of(keys, source)
    config = Config(keys, model_type, head, tokens, decoder_tokens)
    try:
        family = ARCHITECTURES[model_type].read(config)
        check_most(family, "sequence_length", "decoder_sequence_length")  # which are not of the file
        config.unread()
    except ValueError as error:
        if not config.lacks:
            raise ValueError(f"{source}: {error}") from None
    if config.lacks:
        raise ValueError(f"{source}: {head}: {'; '.join(config.lacks)}")
    if "quantization_config" in keys:
        config.remarks.append("quantization_config is of the checkpoint; the training's number format is `dtype`")
    if decoder_tokens is not None and not isinstance(family, T5):
        raise ValueError(
            f"{source}: {head} has no decoder beside an encoder, got a --decoder-sequence-length of {decoder_tokens}; leave it out"
        )
    attention = ARCHITECTURES[model_type].attention
    return HuggingFaceModel(family, head, tuple(config.defaults), tuple(config.remarks), attention)


def _class_of(keys: Mapping[str, Any], source: str) -> tuple[str, str]:
    """Return model type and class. Raises ValueError where no family has them."""
    listed = keys.get("architectures")
    head = str(listed[0]) if isinstance(listed, list) and listed else ""
    if "text_config" in keys:
        raise ValueError(
            f"{source}: {head or keys.get('model_type')} has a text_config beside a tower of images, which no family has; to "
            "plan for its text alone, write its text_config into a file"
        )
    model_type = str(keys.get("model_type") or _type_of(head))
    if model_type in WITHOUT_FAMILY:
        raise ValueError(
            f"{source}: {head or model_type}: {WITHOUT_FAMILY[model_type]}; no family has that; {OTHERWISE}"
        )
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"{source}: {head or 'model_type'} ({model_type}) is not known; {_nearest_family(keys, model_type, head)}"
        )
    heads = ARCHITECTURES[model_type].heads
    if head and head not in heads:
        raise ValueError(
            f"{source}: {head}: {model_type} is planned as {' or '.join(heads)}; write that, or {OTHERWISE}"
        )
    return model_type, head or heads[0]


def _nearest_family(keys: Mapping[str, Any], model_type: str, head: str) -> str:
    """Say which family is nearest to an unknown model, what of the model has no counterpart there, and what to do."""
    near, alike = next(((family, alike) for key, family, alike in _NEAREST if keys.get(key)), ("gpt", "gpt2"))
    config = Config(keys, model_type, head, tokens=1, missing=[])
    with contextlib.suppress(ValueError):  # what was read up to there suffices to tell what is left
        ARCHITECTURES[alike].read(config)
    rest = config.unknown_parts()
    differences = [
        *([f"{', '.join(rest)} {'has' if len(rest) == 1 else 'have'} no counterpart there"] if rest else []),
        *(
            [f"{', '.join(config.missing)} {'is' if len(config.missing) == 1 else 'are'} missing"]
            if config.missing
            else config.lacks
        ),
    ]
    if differences:
        return f"the nearest family is {near}, but {', and '.join(differences)}; {OTHERWISE}"
    return (
        f"the nearest family is {near}; if its layers are those of {alike}, write model_type {alike} and architectures "
        f"[{ARCHITECTURES[alike].heads[0]}], else {OTHERWISE}"
    )


def _type_of(head: str) -> str:
    return next((kind for kind, architecture in ARCHITECTURES.items() if head in architecture.heads), head)
