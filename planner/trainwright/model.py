"""What to train: a list of layers, and what each kind of layer holds, computes and sends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal


class Dtype(StrEnum):
    """The number format of weights and activations."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Dtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Uninterrupted computation inside a layer: what lies between two tensor-parallel all-reduces.

    Attributes:
        forward_flops_per_row: for one row (sequence) at tensor degree 1; backward takes twice as many.
        ends_in_all_reduce: whether, under tensor parallelism, the forward ends with an all-reduce of the layer's
            output (and the backward with one of its input).
    """

    forward_flops_per_row: float
    ends_in_all_reduce: bool


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What identical layers share.

    Attributes:
        name: unique in its model.
        parameters: values held in one layer, all of them.
        split_parameters: those of them that a tensor degree divides; 0 where the layer is not tensor parallel:
            such a layer is computed whole by every rank of its tensor group.
        segments: the computation, in order.
        output_elements_per_row: values of the boundary tensor that leaves the layer, per row.
        shared_weight: name of a weight that layers of other kinds hold too (tied embeddings), or None. Every owner
            keeps it in memory; its gradients are summed over all owners.
        shared_parameters: values of that weight.
    """

    name: str
    parameters: int
    split_parameters: int
    segments: tuple[Segment, ...]
    output_elements_per_row: int
    shared_weight: str | None = None
    shared_parameters: int = 0

    @property
    def is_tensor_parallel(self) -> bool:
        return self.split_parameters > 0

    @property
    def forward_flops_per_row(self) -> float:
        return sum(segment.forward_flops_per_row for segment in self.segments)

    @property
    def tensor_all_reduces(self) -> int:
        """All-reduces of the boundary tensor in one forward (and as many in one backward) under tensor parallelism."""
        return sum(segment.ends_in_all_reduce for segment in self.segments)

    def parameters_at(self, tensor_degree: int) -> int:
        """Values that one rank holds at that tensor degree."""
        return self.parameters - self.split_parameters + self.split_parameters // tensor_degree


@dataclass(frozen=True, slots=True)
class Gpt:
    """GPT-2: learned positions, pre-normalisation, tied embeddings.

    Attributes:
        sequence_length: tokens in a row; the unit of a batch is one row.
    """

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    vocabulary_size: int
    family: Literal["gpt"] = "gpt"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"gpt.{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.heads:
            raise ValueError(
                f"gpt.hidden_size {self.hidden_size} must be a multiple of gpt.heads {self.heads}: "
                "every head takes an equal part"
            )


Family = Gpt
"""The families a model can be built from; a worker builds the same layers from the same family."""


@dataclass(frozen=True)
class Model:
    """A list of layers, each of a kind. Made from a family by `families.build`; `family` lets a worker rebuild it."""

    family: Family
    dtype: Dtype
    kinds: tuple[LayerKind, ...]
    layers: tuple[str, ...]
    max_tensor_degree: int

    @cached_property
    def _kinds(self) -> dict[str, LayerKind]:
        return {kind.name: kind for kind in self.kinds}

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of the layer with that index (0 is the first)."""
        return self._kinds[self.layers[layer]]

    @property
    def parameters(self) -> int:
        """Values of the whole model, a shared weight counted once."""
        total = sum(self.kind_of(layer).parameters for layer in range(len(self.layers)))
        owners: dict[str, list[int]] = {}
        for layer in range(len(self.layers)):
            kind = self.kind_of(layer)
            if kind.shared_weight is not None:
                owners.setdefault(kind.shared_weight, []).append(kind.shared_parameters)
        return total - sum(sum(sizes) - max(sizes) for sizes in owners.values())

    def output_bytes_per_row(self, layer: int) -> int:
        """Bytes of the boundary tensor behind a layer, per row."""
        return self.kind_of(layer).output_elements_per_row * self.dtype.num_bytes
