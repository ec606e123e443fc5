"""Layers: operators, the segments that they form, and kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Final, NamedTuple

from trainwright.bounds import OMITTED_DEFAULT, OMITTED_ONE


class Dtype(StrEnum):
    """Number format of weights and activations."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Dtype.FLOAT32 else 2


class Attention(StrEnum):
    """Implementation of attention, which determines what it saves for the backward.

    FUSED never writes the scores (sequence × sequence for each head) to memory; STORED writes and saves them, as
    runtimes did before fused kernels. MATH is PyTorch's kernel where no fused one takes the number format: it converts
    queries, keys and values to float32, and saves them and the scores in it.
    """

    FUSED = "fused"
    STORED = "stored"
    MATH = "math"


class OperatorKind(StrEnum):
    """Kind of operator, which determines what bounds it and how close devices come to that bound."""

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
    """Parts of an operator that a tensor degree splits: nothing; weight; weight and output; input and weight; or all of them.

    Where the weight alone is split (a look-up), each rank's output is a summand of the result.
    """

    NONE = "none"
    WEIGHT = "weight"
    COLUMN = "column"
    ROW = "row"
    WHOLE = "whole"


class TensorSplit(NamedTuple):
    """Division of the computation of one layer among a tensor group.

    Attributes:
        divides_sequence: activations outside of products and attention are divided along the sequence.
    """

    degree: int
    divides_sequence: bool = False


WHOLE_LAYER = TensorSplit(1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Values of the model's number format, and bytes in others, that operators of a user's layer read and write per row."""

    forward_elements: float
    forward_bytes: float
    backward_elements: float
    backward_bytes: float


NO_TRAFFIC: Final = Traffic(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator of a layer at tensor degree 1, with figures per row (sequence, image).

    Attributes:
        forward_flops_per_row: 2 for each multiply-add; 0 if only memory bounds it.
        input_elements_per_row, output_elements_per_row: elements read and written.
        positions_per_row: tokens or pixels; input and output divided by it are a matrix product's inner and outer
            width.
        weight_elements: parameters, read once per micro-batch regardless of its rows.
        saved_elements_per_row: elements in the model's dtype that autograd saves because of this operator; a tensor
            that two operators save counts at one of them. Split where the input is.
        saved_bytes_per_row: saved in other formats (indices, masks, float32 statistics).
        half_saved_bytes_per_row: all that is saved in half formats, as counted; 0: it follows from the two above.
        saved_elements_per_micro_batch: saved once for all rows of a micro-batch (score biases), split as well.
        is_causal: no position attends to later ones; the figures count all pairs, of which fused kernels skip about half.
        traffic: as counted, where memory bounds it; None: it follows from inputs, outputs and what is saved.
        calls: products of equal shape for which it stands; its figures are the sums of them all, positions aside.
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
    saved_elements_per_micro_batch: float = 0.0
    is_causal: bool = False
    traffic: Annotated[Traffic | None, OMITTED_DEFAULT] = None
    half_saved_bytes_per_row: Annotated[float, OMITTED_DEFAULT] = 0.0
    calls: Annotated[int, OMITTED_ONE] = 1

    @property
    def weight_tensors(self) -> int:
        """Tensors that hold its weights; the bias of a product, and of a normalisation, is one of its own."""
        if not self.weight_elements:
            return 0
        if self.kind is OperatorKind.NORMALISATION and self.output_elements_per_row:
            return self.calls * max(
                round(self.weight_elements * self.positions_per_row / self.output_elements_per_row), 1
            )
        if not self.forward_flops_per_row:
            return self.calls
        has_bias = self.weight_elements > self.forward_flops_per_row / (2 * self.positions_per_row)
        return self.calls * (1 + has_bias)

    def saved_bytes(self, dtype: Dtype, tensor: int, *, sequence_parallel: bool = False) -> float:
        """Return bytes saved for the backward, per row, on one of `tensor` ranks."""
        saved = self.saved_elements_per_row * dtype.num_bytes + self.saved_bytes_per_row
        if self.half_saved_bytes_per_row and dtype is not Dtype.FLOAT32:
            saved = self.half_saved_bytes_per_row
        if sequence_parallel and self.split is Split.NONE:
            return saved / tensor
        return self._share(saved, tensor)

    def saved_bytes_once(self, dtype: Dtype, tensor: int) -> float:
        """Return bytes saved for the backward, per micro-batch, besides those per row, on one of `tensor` ranks."""
        return self._share(self.saved_elements_per_micro_batch * dtype.num_bytes, tensor)

    def _share(self, kept: float, tensor: int) -> float:
        return kept / tensor if self.split in {Split.ROW, Split.WHOLE} else kept


@dataclass(frozen=True, slots=True)
class Segment:
    """Uninterrupted computation in a layer, between two collectives of the tensor group.

    Attributes:
        forward_all_reduce_elements_per_row: reduced over the tensor group when the segment's forward ends.
        backward_all_reduce_elements_per_row: reduced when its backward ends.
        forward_gathered_bytes_per_row: that each rank gives to an all-gather when the segment's forward ends.
    """

    operators: tuple[Operator, ...]
    forward_all_reduce_elements_per_row: int = 0
    backward_all_reduce_elements_per_row: int = 0
    forward_gathered_bytes_per_row: Annotated[int, OMITTED_DEFAULT] = 0

    @property
    def forward_flops_per_row(self) -> float:
        """FLOPs of one row at tensor degree 1; the backward takes twice as many."""
        return sum(operator.forward_flops_per_row for operator in self.operators)

    @property
    def ends_in_all_reduce(self) -> bool:
        """True if the forward ends with an all-reduce under tensor parallelism."""
        return self.forward_all_reduce_elements_per_row > 0


@dataclass(frozen=True)
class LayerKind:
    """Description that identical layers share.

    Attributes:
        name: unique in its model.
        output_elements_per_row: elements of the boundary (one tensor or several) after the layer, per row.
        output_bytes_per_row: bytes of the integers that a user's layer adds to it.
        output_float32_elements_per_row: those of its elements that a user's layer hands on in float32 in half formats, too.
        shared_weight: name of a weight that layers of other kinds share (tied embeddings), or None. Every owner stores
            it; its gradients are reduced over all owners.
        shared_parameters: size of that weight.
        passed_elements_per_row: of its input that a user's layer hands on unchanged; what it saves leaves them out.
        workspace_bytes_per_row: what a layer of a user's model takes for a moment besides what it saves.
        buffer_bytes: of a user's layer, whole on every rank that computes it.
        changed_buffer_bytes: those of them that its forward changes.
        forward_kernels, backward_kernels: operators of torch that a user's layer issues; 0: as many as its operators.
        frozen_parameters: parameters of a user's layer that are not trained.
        without_backward: whether a user's layer and all before it are frozen, so that no backward is computed.
    """

    name: str
    segments: tuple[Segment, ...]
    output_elements_per_row: int
    shared_weight: str | None = None
    shared_parameters: int = 0
    passed_elements_per_row: Annotated[float, OMITTED_DEFAULT] = 0.0
    workspace_bytes_per_row: Annotated[float, OMITTED_DEFAULT] = 0.0
    buffer_bytes: Annotated[int, OMITTED_DEFAULT] = 0
    changed_buffer_bytes: Annotated[int, OMITTED_DEFAULT] = 0
    forward_kernels: Annotated[int, OMITTED_DEFAULT] = 0
    backward_kernels: Annotated[int, OMITTED_DEFAULT] = 0
    output_bytes_per_row: Annotated[int, OMITTED_DEFAULT] = 0
    output_float32_elements_per_row: Annotated[int, OMITTED_DEFAULT] = 0
    frozen_parameters: Annotated[int, OMITTED_DEFAULT] = 0
    without_backward: Annotated[bool, OMITTED_DEFAULT] = False

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(operator for segment in self.segments for operator in segment.operators)

    @cached_property
    def flops_shares(self) -> tuple[float, ...]:
        """Each operator's share of the FLOPs, equal ones if there are none: of the layer's time on an emulated device."""
        flops = [operator.forward_flops_per_row for operator in self.operators]
        whole = sum(flops)
        return tuple(own / whole if whole else 1 / len(flops) for own in flops)

    @cached_property
    def parameters(self) -> int:
        return sum(operator.weight_elements for operator in self.operators)

    @cached_property
    def weight_tensors(self) -> int:
        """Tensors that hold its parameters."""
        return sum(operator.weight_tensors for operator in self.operators)

    @cached_property
    def weight_modules(self) -> int:
        """Operators that have parameters, each a module of its own."""
        return sum(operator.calls for operator in self.operators if operator.weight_elements)

    @property
    def trained_parameters(self) -> int:
        return self.parameters - self.frozen_parameters

    @property
    def backward_share(self) -> float:
        """Part of a backward's work that is left where weights are frozen: half of it is for the gradients of weights."""
        if self.without_backward:
            return 0.0
        return 1 - self.frozen_parameters / self.parameters / 2 if self.frozen_parameters else 1.0

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of buffers whose values a recomputed forward keeps for its backward."""
        return 0 if self.without_backward else self.changed_buffer_bytes

    @cached_property
    def split_parameters(self) -> int:
        """Parameters that a tensor degree splits.

        0 without tensor parallelism: then every rank of the tensor group computes the full layer.
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
        """Return the parameters of one rank at a tensor degree."""
        return self.parameters - self.split_parameters + self.split_parameters // tensor_degree

    def saved_bytes_per_row(self, dtype: Dtype, tensor_degree: int = 1, *, sequence_parallel: bool = False) -> float:
        """Return what one rank saves of a row's forward for its backward, including the layer's input."""
        degree = tensor_degree if self.is_tensor_parallel else 1
        return sum(
            operator.saved_bytes(dtype, degree, sequence_parallel=sequence_parallel) for operator in self.operators
        )

    def saved_bytes(self, dtype: Dtype, tensor_degree: int, rows: int, *, sequence_parallel: bool = False) -> float:
        """Return what one rank saves of a forward of `rows` rows for its backward, including the layer's input."""
        degree = tensor_degree if self.is_tensor_parallel else 1
        once = sum(operator.saved_bytes_once(dtype, degree) for operator in self.operators)
        return rows * self.saved_bytes_per_row(dtype, degree, sequence_parallel=sequence_parallel) + once


FLOPS_PER_BYTE: dict[Dtype, float] = {Dtype.FLOAT32: 20.0, Dtype.FLOAT16: 150.0, Dtype.BFLOAT16: 150.0}
"""Approximate arithmetic intensity at which data-centre GPUs change from memory-bound to compute-bound.

It only splits a layer's profiled seconds among its operators and predicts no seconds itself.
"""


def sequence_parallel_seconds_ratio(kind: LayerKind, tensor: int, rows: int, dtype: Dtype) -> float:
    """Return by how much a layer's compute shrinks where normalisations and residuals see 1/t of the sequence.

    Profiles are of the whole sequence; FLOPs and traffic split their seconds among operators.
    """
    divided, whole = _work_per_row(kind, tensor, rows, dtype)
    return (divided + whole / tensor) / (divided + whole) if divided + whole else 1.0


def least_sequence_parallel_seconds_ratio(kind: LayerKind, tensor: int, max_rows: int, dtype: Dtype) -> float:
    """Return a lower bound on `sequence_parallel_seconds_ratio` of up to `max_rows` rows.

    Work per row shrinks with the rows, since all of them share the weights, and the ratio with the divided part of the work.
    """
    divided, whole = _work_per_row(kind, tensor, max_rows, dtype)[0], _work_per_row(kind, tensor, 1, dtype)[1]
    return (divided + whole / tensor) / (divided + whole) if divided + whole else 1.0


def _work_per_row(kind: LayerKind, tensor: int, rows: int, dtype: Dtype) -> tuple[float, float]:
    """Return a rank's FLOPs of one row, or as many as it could do meanwhile, of operators that are divided and of others."""
    divided = whole = 0.0
    for operator in kind.operators:
        moved = operator.input_elements_per_row + operator.output_elements_per_row + operator.weight_elements / rows
        work = max(operator.forward_flops_per_row, moved * dtype.num_bytes * FLOPS_PER_BYTE[dtype])
        if operator.split is Split.NONE:
            whole += work
        else:
            divided += work / tensor
    return divided, whole


def sequence_parallel_bytes_ratio(
    kind: LayerKind, tensor: int, rows: int, dtype: Dtype, *, gathers_inputs_again: bool = False
) -> float:
    """Return by how much what a layer saves shrinks if a rank saves its part of the sequence outside of products.

    If the backward gathers the inputs of products again, a rank saves its part of them, too: 1/t of everything
    (Korthikanti et al. 2022, equation 4).
    """
    whole = kind.saved_bytes(dtype, tensor, rows)
    if gathers_inputs_again:
        left = kind.saved_bytes(dtype, 1, rows) / tensor
    else:
        left = kind.saved_bytes(dtype, tensor, rows, sequence_parallel=True)
    return left / whole if whole else 1.0


@dataclass(frozen=True, slots=True)
class LayerList:
    """Layers of a family: the kinds, and the name of every layer's kind in order.

    Attributes:
        max_tensor_degree: multiple of every possible tensor degree (attention heads, usually).
        divided: those of the kinds with a vocabulary, as a tensor group computes them that divides it.
        sequences: names of the kinds that can run sequence parallel, with the lengths that the tensor degree must divide.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[str, ...]
    max_tensor_degree: int
    divided: tuple[LayerKind, ...] = ()
    sequences: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
