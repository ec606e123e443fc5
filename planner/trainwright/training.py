"""Training request: a model's family, its number format and the batch of one iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from trainwright.document_kind import document
from trainwright.families import FAMILIES, T5, Bert, Custom, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.layer import Attention, Dtype
from trainwright.model import Model

MAX_LAYERS = 1024
MAX_BATCH_SIZE = 1_000_000
"""Limits beyond which a document is taken for a mistake; a search would take minutes and gigabytes."""

Optimizer = Literal["adam", "sgd"]


class RequestedDtype(StrEnum):
    """Number format of a request: one by name, or the fastest that all devices of a plan compute natively."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@document("Training")
@dataclass(frozen=True)
class Training:
    """Document for `--model`.

    For example:

        gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 52256}
        global_batch_size: 32
        dtype: float16
        optimizer: adam

    Attributes:
        global_batch_size: rows (sequences, images) in one iteration, over all devices.
        attention: implementation of attention, which determines what it saves for the backward.
    """

    global_batch_size: int
    gpt: Gpt | None = None
    dtype: RequestedDtype = RequestedDtype.AUTO
    optimizer: Optimizer = "adam"
    attention: Attention = Attention.FUSED
    llama: Llama | None = None
    bert: Bert | None = None
    vit: Vit | None = None
    swin: Swin | None = None
    t5: T5 | None = None
    moe: Moe | None = None
    wide_resnet: WideResnet | None = None
    trans_gan: TransGan | None = None
    custom: Custom | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch_size <= MAX_BATCH_SIZE:
            raise ValueError(f"global_batch_size must be 1 … {MAX_BATCH_SIZE}, got {self.global_batch_size}")
        given = [name for name in FAMILIES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one model family ({', '.join(FAMILIES)}), got {', '.join(given) or 'none'}")
        stack = self.family.stack(self.attention)
        if len(stack.layers) > MAX_LAYERS + 2:
            raise ValueError(f"{given[0]} has {len(stack.layers)} layers; at most {MAX_LAYERS} and two are planned")

    @property
    def family(self) -> Family:
        """Family that is given."""
        families: tuple[Family | None, ...] = tuple(getattr(self, name) for name in FAMILIES)
        return next(family for family in families if family is not None)

    def in_format(self, dtype: Dtype) -> Training:
        """Return the same training in a number format."""
        return replace(self, dtype=RequestedDtype(dtype))

    @cached_property
    def model(self) -> Model:
        """Model in the number format by name; raises ValueError for `auto`."""
        return Model.of(self.family, Dtype(self.dtype), self.attention)


def training_of(family: Family, others: Mapping[str, Any]) -> Training:
    """Return the training of a family with the other fields of its document."""
    return Training(**{**others, family.family: family})
