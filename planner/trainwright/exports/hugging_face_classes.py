"""Classes of transformers that train the families of models, with their example scripts and inputs.

Names: src/transformers/models/auto/modeling_auto.py and examples/pytorch of https://github.com/huggingface/transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, Vit

Sizes = tuple[tuple[str, int], ...]
"""Constants of a script, by name."""

_TOKENS: Final = 'yield dict.fromkeys(("input_ids", "labels"), integers(VOCABULARY, ROWS, SEQUENCE))'
_TWO_SENTENCES: Final = (
    "tokens = integers(VOCABULARY, ROWS, SEQUENCE)\n"
    '        yield {"input_ids": tokens, "labels": tokens, "next_sentence_label": integers(2, ROWS)}'
)
_PAIRS: Final = (
    "inputs, labels = integers(VOCABULARY, ROWS, SEQUENCE), integers(VOCABULARY, ROWS, DECODER_SEQUENCE)\n"
    '        yield {"input_ids": inputs, "labels": labels}'
)
_IMAGES: Final = (
    "pixels = torch.randn(ROWS, CHANNELS, IMAGE, IMAGE, generator=generator).to(device)\n"
    '        yield {"pixel_values": pixels, "labels": integers(CLASSES, ROWS)}'
)


@dataclass(frozen=True, slots=True)
class HuggingFaceClass:
    """Class of transformers that a model is loaded by to be trained.

    Attributes:
        example: sentence on the example script, with its arguments for the sizes of a row.
        sizes: of the inputs of a row.
        batch: lines that make a batch of random inputs of `sizes`, and yield it.
    """

    name: str
    example: str
    sizes: Sizes
    batch: str


CAUSAL: Final = HuggingFaceClass("AutoModelForCausalLM", "", (("SEQUENCE", 1024), ("VOCABULARY", 32000)), _TOKENS)
"""Class where there is no model, or one of the user's: its sizes are assumed."""


def hugging_face_class(family: Family) -> HuggingFaceClass | None:
    """Return the class that trains a family; None for a family that transformers lacks."""
    match family:
        case Gpt() | Llama() | Moe():
            tokens = family.sequence_length
            example = f"The plan is for rows of {tokens} tokens: give the script that length (run_clm.py: --block_size {tokens})."
            return HuggingFaceClass("AutoModelForCausalLM", example, _token_sizes(family), _TOKENS)
        case Bert(sequence_length=tokens, next_sentence=True):
            example = f"The plan is for rows of {tokens} tokens with next_sentence, which no example script of transformers trains."
            return HuggingFaceClass("AutoModelForPreTraining", example, _token_sizes(family), _TWO_SENTENCES)
        case Bert(sequence_length=tokens):
            example = f"The plan is for rows of {tokens} tokens: give the script that length (run_mlm.py: --max_seq_length {tokens})."
            return HuggingFaceClass("AutoModelForMaskedLM", example, _token_sizes(family), _TOKENS)
        case T5(sequence_length=tokens, decoder_tokens=decoder_tokens):
            example = (
                f"The plan is for rows of {tokens} tokens, with {decoder_tokens} of the decoder: give the script both lengths "
                f"(run_translation.py and run_summarization.py: --max_source_length {tokens} --max_target_length {decoder_tokens} "
                "--pad_to_max_length true)."
            )
            sizes = (*_token_sizes(family), ("DECODER_SEQUENCE", decoder_tokens))
            return HuggingFaceClass("AutoModelForSeq2SeqLM", example, sizes, _PAIRS)
        case Vit() | Swin():
            side = family.image_size
            example = f"The plan is for images of {side} × {side} pixels (run_image_classification.py: those of its image processor)."
            sizes = (("IMAGE", side), ("CHANNELS", family.channels), ("CLASSES", family.classes))
            return HuggingFaceClass("AutoModelForImageClassification", example, sizes, _IMAGES)
        case _:
            return None


def _token_sizes(family: Gpt | Llama | Moe | Bert | T5) -> Sizes:
    return (("SEQUENCE", family.sequence_length), ("VOCABULARY", family.vocabulary_size))
