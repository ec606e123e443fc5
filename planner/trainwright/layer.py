"""What a layer holds, computes, keeps and sends: operators, the segments they form, and kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Dtype(StrEnum):
    """The number format of weights and activations."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Dtype.FLOAT32 else 2


class Attention(StrEnum):
    """How attention is computed, which decides what it keeps for the backward.

    FUSED never writes the scores (sequence × sequence for each head) to memory; STORED writes and keeps them, as
    runtimes did before fused kernels.
    """

    FUSED = "fused"
    STORED = "stored"


class OperatorKind(StrEnum):
    """What limits an operator, and how well devices reach that limit."""

    MATMUL = "matmul"
    BATCHED_MATMUL = "batched_matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    SOFTMAX = "softmax"
    NORMALISATION = "normalisation"
    ELEMENT_WISE = "element_wise"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    ROUTING = "routing"


class Split(StrEnum):
    """What a tensor degree divides: nothing; weight and output; input and weight; or all of them."""

    NONE = "none"
    COLUMN = "column"
    ROW = "row"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a layer, at tensor degree 1, by the row (sequence, image).

    Attributes:
        forward_flops_per_row: 2 for each multiply-add; 0 where memory alone limits it.
        input_elements_per_row, output_elements_per_row: values read and written.
        positions_per_row: tokens or pixels; input and output divided by it are a matrix product's inner and outer width.
        weight_elements: parameters, read once for each micro-batch whatever its rows.
        saved_elements_per_row: values of the model's number format that autograd keeps because of this operator;
            a tensor that two operators keep counts at one of them. Divided where the input is.
        saved_bytes_per_row: what it keeps in other formats (indices, masks, float32 statistics).
    """

    name: str
    kind: OperatorKind
    forward_flops_per_row: float
    input_elements_per_row: float
    output_elements_per_row: float
    positions_per_row: int = 1
    weight_elements: int = 0
    saved_elements_per_row: float = 0.0
    saved_bytes_per_row: float = 0.0
    split: Split = Split.NONE

    def saved_bytes(self, dtype: Dtype, tensor: int) -> float:
        """Bytes kept for the backward, per row, on one of `tensor` ranks."""
        kept = self.saved_elements_per_row * dtype.num_bytes + self.saved_bytes_per_row
        return kept / tensor if self.split in {Split.ROW, Split.WHOLE} else kept


@dataclass(frozen=True, slots=True)
class Segment:
    """Uninterrupted computation inside a layer: what lies between two tensor-parallel all-reduces.

    Attributes:
        forward_all_reduce_elements_per_row: what the ranks of a tensor group sum when the segment's forward ends.
        backward_all_reduce_elements_per_row: and when its backward ends.
    """

    operators: tuple[Operator, ...]
    forward_all_reduce_elements_per_row: int = 0
    backward_all_reduce_elements_per_row: int = 0

    @property
    def forward_flops_per_row(self) -> float:
        """For one row at tensor degree 1; backward takes twice as many."""
        return sum(operator.forward_flops_per_row for operator in self.operators)

    @property
    def ends_in_all_reduce(self) -> bool:
        """Whether, under tensor parallelism, the forward ends with an all-reduce (and the backward with one)."""
        return self.forward_all_reduce_elements_per_row > 0


@dataclass(frozen=True)
class LayerKind:
    """What identical layers share.

    Attributes:
        name: unique in its model.
        segments: the computation, in order.
        output_elements_per_row: values of the boundary (one tensor or several) that leaves the layer, per row.
        shared_weight: name of a weight that layers of other kinds hold too (tied embeddings), or None. Every owner
            keeps it in memory; its gradients are summed over all owners.
        shared_parameters: values of that weight.
    """

    name: str
    segments: tuple[Segment, ...]
    output_elements_per_row: int
    shared_weight: str | None = None
    shared_parameters: int = 0

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(operator for segment in self.segments for operator in segment.operators)

    @cached_property
    def parameters(self) -> int:
        """Values held in one layer, all of them."""
        return sum(operator.weight_elements for operator in self.operators)

    @cached_property
    def split_parameters(self) -> int:
        """Those of them that a tensor degree divides.

        0 where the layer is not tensor parallel: such a layer is computed whole by every rank of its tensor group.
        """
        return sum(operator.weight_elements for operator in self.operators if operator.split is not Split.NONE)

    @property
    def is_tensor_parallel(self) -> bool:
        return self.split_parameters > 0

    @cached_property
    def forward_flops_per_row(self) -> float:
        return sum(segment.forward_flops_per_row for segment in self.segments)

    @cached_property
    def tensor_all_reduces(self) -> int:
        """All-reduces in one forward (and as many in one backward) under tensor parallelism."""
        return sum(segment.ends_in_all_reduce for segment in self.segments)

    def parameters_at(self, tensor_degree: int) -> int:
        """Values that one rank holds at that tensor degree."""
        return self.parameters - self.split_parameters + self.split_parameters // tensor_degree

    def saved_bytes_per_row(self, dtype: Dtype, tensor_degree: int = 1) -> float:
        """What one rank keeps of a row's forward until its backward, the layer's input included."""
        degree = tensor_degree if self.is_tensor_parallel else 1
        return sum(operator.saved_bytes(dtype, degree) for operator in self.operators)


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of a family: the kinds, and the kind's name of every layer in order.

    Attributes:
        max_tensor_degree: every tensor degree must divide it (attention heads, usually).
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[str, ...]
    max_tensor_degree: int
