"""What a person asks to train: a model's family, its number format and the batch of one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trainwright import families
from trainwright.model import Dtype, Gpt, Model

MAX_LAYERS = 1024
MAX_BATCH_SIZE = 1_000_000
"""Beyond these a document is taken for a slip of the pen; a search would take minutes and gigabytes on it."""

Optimizer = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Training:
    """The document behind `--model`.

    For example:

        gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 52256}
        global_batch_size: 32
        dtype: float16
        optimizer: adam

    Attributes:
        global_batch_size: rows (sequences) in one iteration, over all devices.
    """

    gpt: Gpt
    global_batch_size: int
    dtype: Dtype = Dtype.FLOAT32
    optimizer: Optimizer = "adam"

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch_size <= MAX_BATCH_SIZE:
            raise ValueError(f"global_batch_size must be 1 … {MAX_BATCH_SIZE}, got {self.global_batch_size}")
        if self.gpt.layers > MAX_LAYERS:
            raise ValueError(f"gpt.layers must be at most {MAX_LAYERS}, got {self.gpt.layers}")

    @cached_property
    def model(self) -> Model:
        """The layers of the family."""
        return families.build(self.gpt, self.dtype)
