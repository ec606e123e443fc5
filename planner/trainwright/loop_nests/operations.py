"""Loop nests of a layer's operators over named dimensions (paper §4.1, Table 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from trainwright.layer import Dtype, Operator, OperatorKind, Split
from trainwright.operator_shardings import Loop, LoopMapping


class Axis(IntEnum):
    """Tensor axes that a mesh dimension can shard, NOTHING for replication.

    WIDTH is the last axis: hidden, heads, channels or classes. Weights use WIDTH and INNER.
    """

    NOTHING = 0
    BATCH = 1
    SEQUENCE = 2
    WIDTH = 3
    EXPERT = 4
    INNER = 5


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """Tensor that an operator reads, stores or writes.

    Attributes:
        axes: loops that index it, each with its tensor axis. Sharding any other loop leaves partial sums: of the tensor
            where it is written, of its gradient where it is read.
        elements: values per row; for a weight, values in all.
    """

    axes: tuple[tuple[Loop, Axis], ...]
    elements: float

    def axis(self, loop: Loop | None) -> Axis:
        """Return the axis that a loop indexes, NOTHING if it does not index the tensor."""
        return next((axis for name, axis in self.axes if name is loop), Axis.NOTHING)

    def loop(self, axis: Axis) -> Loop | None:
        """Return the loop that indexes an axis."""
        return next((name for name, own in self.axes if own is axis), None)


def spec_of(tensor: IndexedTensor, mapping: LoopMapping) -> str:
    """Return the spec of a tensor, as in `S0 R S1` (paper Table 1): each mesh dimension shards the axis that its loop indexes."""
    marks = ("".join(str(d) for d in (0, 1) if mapping[d] is loop) for loop, _ in tensor.axes)
    return " ".join(f"S{mark}" if mark else "R" for mark in marks)


@dataclass(frozen=True, slots=True)
class Operation:
    """Operator of a layer.

    Attributes:
        loops: shardable loops with their sizes; the batch's size is the micro-batch's rows, written 0 here.
        operands: tensors read from other operators, in order.
        internal_sums: small sums internal to the operator (normalisation moments, softmax statistics) with their loops,
            or None. Devices that shard such a loop all-reduce them, forward and backward.
        is_heavy: whether its computation is never replicated (paper §4.2).
        is_trivial: whether it takes an operand's layout instead of choosing its own (paper §4.2).
        tensor_parallel_loops: loops that the plan document's tensor degree shards; if empty, each tensor rank computes
            all.
        flops_per_row, moved_per_row: forward FLOPs, and values read and written.
        saved_bytes_per_row, half_saved_bytes_per_row: saved for the backward in float32, and in half formats, sharded like the
            first operand.
    """

    name: str
    loops: tuple[tuple[Loop, int], ...]
    output: IndexedTensor
    operands: tuple[IndexedTensor, ...] = ()
    weight: IndexedTensor | None = None
    internal_sums: tuple[IndexedTensor, tuple[Loop, ...]] | None = None
    is_heavy: bool = False
    is_trivial: bool = False
    tensor_parallel_loops: tuple[Loop, ...] = ()
    flops_per_row: float = 0.0
    moved_per_row: float = 0.0
    saved_bytes_per_row: float = 0.0
    half_saved_bytes_per_row: float = 0.0

    def max_parts(self, loop: Loop, rows: int) -> int:
        """Return the size of a loop, the largest number of parts it can be sharded into."""
        return rows if loop is Loop.BATCH else dict(self.loops)[loop]


KERNEL_AREAS: Final[Mapping[str, int]] = {"convolve": 9, "stem": 49}
"""Kernel areas of convolutions by name, 1 by default: weights are kernel area × channels × filters."""

MOVES_POSITIONS: Final = frozenset({"windows", "into_windows", "out_of_windows", "grow", "neighbours", "mean"})
"""Element-wise operators that move values between positions, make several of one or one of several."""

PRODUCTS_IN_ONE: Final[Mapping[str, int]] = {
    "query_key_value": 3,
    "cross_key_value": 2,
    "gate_and_up": 2,
    "experts_gate_and_up": 2,
}
"""Number of equal products that a weight holds, by name of the operator; 1 by default."""

FLOAT32_BYTES = 4

_BATCH, _SEQUENCE, _EXPERT = (Loop.BATCH, Axis.BATCH), (Loop.SEQUENCE, Axis.SEQUENCE), (Loop.EXPERT, Axis.EXPERT)


@dataclass(frozen=True, slots=True)
class FamilyShapes:
    """Shapes of a model family that its operators do not contain.

    Attributes:
        attention_parts: largest number of parts attention can be sharded into (key and value heads).
        heads: query heads; None where the family states none, and keys have as many heads as queries.
        experts: 0 outside mixtures of experts.
        patch_size: side of a patch; 0 where images have none.
        has_pixels: whether positions are pixels that convolutions read, which are not sharded.
        has_rotary: whether positions turn queries and keys, which are sharded by whole heads from their projection on.
    """

    attention_parts: int
    heads: int | None = None
    experts: int = 0
    patch_size: int = 0
    has_pixels: bool = False
    has_rotary: bool = False


def build_operation(operator: Operator, shapes: FamilyShapes, *, accumulates: bool = False) -> Operation:
    """Build the loop nest of an operator.

    `accumulates`: the output is added to that of another branch, as for a residual or a further embedding.
    """
    if accumulates and operator.kind is OperatorKind.EMBEDDING:
        operation = _added_embedding(operator)
    elif accumulates:
        operation = _element_wise(operator, shapes)
        operation = replace(operation, operands=operation.operands * 2)
    else:
        operation = _NESTS[operator.kind](operator, shapes)
    return replace(
        operation,
        flops_per_row=operator.forward_flops_per_row,
        moved_per_row=operator.input_elements_per_row + operator.output_elements_per_row,
        saved_bytes_per_row=operator.saved_bytes(Dtype.FLOAT32, 1),
        half_saved_bytes_per_row=operator.saved_bytes(Dtype.BFLOAT16, 1),
    )


def is_expert_operator(operator: Operator) -> bool:
    """Return whether the operator works on tokens dispatched to experts."""
    return operator.name.startswith("experts_")


def _matmul(operator: Operator, shapes: FamilyShapes) -> Operation:
    inner = round(operator.input_elements_per_row / operator.positions_per_row)
    outer = _output_parts(operator, shapes)
    loops = [(Loop.BATCH, 0), (Loop.IN, inner), (Loop.OUT, outer), (Loop.SEQUENCE, operator.positions_per_row)]
    outside = [_BATCH, _SEQUENCE]
    weight = [(Loop.IN, Axis.INNER), (Loop.OUT, Axis.WIDTH)]
    if is_expert_operator(operator):
        loops[-1] = (Loop.EXPERT, shapes.experts)
        outside[-1] = _EXPERT
        weight.append(_EXPERT)
    return _matmul_nest(operator, tuple(loops), tuple(outside), tuple(weight))


def _output_parts(operator: Operator, shapes: FamilyShapes) -> int:
    """Return the most parts of a product's output: of several products in one, each is divided, so the narrowest counts."""
    width = round(operator.output_elements_per_row / operator.positions_per_row)
    if operator.name == "query_key_value" and shapes.heads is not None:
        keys = width * shapes.attention_parts // (shapes.heads + 2 * shapes.attention_parts)
        return shapes.attention_parts if shapes.has_rotary else keys
    return width // PRODUCTS_IN_ONE.get(operator.name, 1)


def _convolution(operator: Operator, shapes: FamilyShapes) -> Operation:
    """Build a convolution over batch, input and output channels; pixels are not sharded (paper Fig. 13).

    The input of patches is divided by the rows of a patch, which may be more than its channels.
    """
    filters = round(operator.output_elements_per_row / operator.positions_per_row)
    products = round(operator.forward_flops_per_row / operator.positions_per_row / 2)
    channels = products // filters // KERNEL_AREAS.get(operator.name, 1)
    inner = shapes.patch_size if operator.name == "patches" else channels
    loops = ((Loop.BATCH, 0), (Loop.IN, inner), (Loop.OUT, filters))
    return _matmul_nest(operator, loops, (_BATCH,), ((Loop.IN, Axis.INNER), (Loop.OUT, Axis.WIDTH)))


def _matmul_nest(
    operator: Operator,
    loops: tuple[tuple[Loop, int], ...],
    outside: tuple[tuple[Loop, Axis], ...],
    weight: tuple[tuple[Loop, Axis], ...],
) -> Operation:
    splits = {Split.COLUMN: (Loop.OUT,), Split.ROW: (Loop.IN,)}
    return Operation(
        operator.name,
        loops,
        IndexedTensor((*outside, (Loop.OUT, Axis.WIDTH)), operator.output_elements_per_row),
        (IndexedTensor((*outside, (Loop.IN, Axis.WIDTH)), operator.input_elements_per_row),),
        IndexedTensor(weight, operator.weight_elements),
        is_heavy=True,
        tensor_parallel_loops=splits.get(operator.split, ()),
    )


def _attention(operator: Operator, shapes: FamilyShapes) -> Operation:
    """Build attention, where sharding the queries' positions needs unsharded keys and values."""
    queries = operator.output_elements_per_row
    return _per_head(operator, shapes, queries, operator.input_elements_per_row - queries)


def _batched_matmul(operator: Operator, shapes: FamilyShapes) -> Operation:
    """Build scores (queries × keys) or context (scores × values) per head.

    The FLOPs, 2 × queries × keys × width, determine how the elements read split between the operands.
    """
    products, positions = operator.forward_flops_per_row / 2, operator.positions_per_row
    read, written = operator.input_elements_per_row, operator.output_elements_per_row
    if shapes.heads is not None:
        first = products * shapes.heads / written * positions
    else:
        first = read / 2 if operator.name.endswith("scores") else read - written
    return _per_head(operator, shapes, first, read - first)


def _per_head(operator: Operator, shapes: FamilyShapes, first: float, second: float) -> Operation:
    heads = (Loop.HEADS, Axis.WIDTH)
    return Operation(
        operator.name,
        ((Loop.BATCH, 0), (Loop.HEADS, shapes.attention_parts), (Loop.SEQUENCE, operator.positions_per_row)),
        IndexedTensor((_BATCH, _SEQUENCE, heads), operator.output_elements_per_row),
        (IndexedTensor((_BATCH, _SEQUENCE, heads), first), IndexedTensor((_BATCH, heads), second)),
        is_heavy=True,
        tensor_parallel_loops=(Loop.HEADS,),
    )


def _element_wise(operator: Operator, shapes: FamilyShapes) -> Operation:
    """Build an element-wise operator, over positions or, like the products that it follows, over experts."""
    if operator.name in MOVES_POSITIONS and not shapes.has_pixels:
        return _moved_positions(operator)
    axes = (_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH), _EXPERT)
    unsharded = {Loop.EXPERT, Loop.SEQUENCE} if shapes.has_pixels else {Loop.EXPERT}
    if is_expert_operator(operator):
        unsharded = {Loop.SEQUENCE}
    sizes = {Loop.EXPERT: shapes.experts}
    values = operator.output_elements_per_row
    weight = IndexedTensor(((Loop.WIDTH, Axis.WIDTH), _EXPERT), operator.weight_elements)
    return Operation(
        operator.name,
        tuple((loop, sizes.get(loop, 0)) for loop, _ in axes if loop not in unsharded),
        IndexedTensor(axes, values),
        (IndexedTensor(axes, values),),
        weight if operator.weight_elements else None,
        is_trivial=True,
        tensor_parallel_loops=() if operator.split is Split.NONE else (Loop.WIDTH,),
    )


def _moved_positions(operator: Operator) -> Operation:
    """Build an operator that moves values between positions, which are therefore not sharded.

    Nor is the width where it becomes that of four neighbours, one after the other.
    """
    tensor = IndexedTensor((_BATCH, (Loop.WIDTH, Axis.WIDTH)), operator.output_elements_per_row)
    width = round(operator.output_elements_per_row / operator.positions_per_row)
    loops = ((Loop.BATCH, 0), *([] if operator.name == "neighbours" else [(Loop.WIDTH, width)]))
    return Operation(operator.name, loops, tensor, (tensor,))


def _normalisation(operator: Operator, shapes: FamilyShapes) -> Operation:
    """Build a normalisation with one or two moments per position summed over the width; batch normalisation has none."""
    operation = _element_wise(operator, shapes)
    moments = operator.saved_bytes_per_row / FLOAT32_BYTES
    return replace(
        operation, internal_sums=(IndexedTensor((_BATCH, _SEQUENCE), moments), (Loop.WIDTH,)) if moments else None
    )


def _softmax(operator: Operator, shapes: FamilyShapes) -> Operation:
    """Build softmax over scores, whose width axis is heads here; keys are not sharded."""
    return _element_wise(operator, shapes)


def _cross_entropy(operator: Operator, shapes: FamilyShapes) -> Operation:  # noqa: ARG001 - as all of them
    """Build cross-entropy, whose maximum, sum of exponentials and target logit are sums over the classes (its width)."""
    axes = (_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH))
    return Operation(
        operator.name,
        tuple((loop, 0) for loop, _ in axes),
        IndexedTensor((_BATCH,), operator.output_elements_per_row),
        (IndexedTensor(axes, operator.input_elements_per_row),),
        internal_sums=(IndexedTensor((_BATCH, _SEQUENCE), 3 * operator.positions_per_row), (Loop.WIDTH,)),
        is_trivial=True,
    )


def _lookup(operator: Operator, shapes: FamilyShapes) -> Operation:  # noqa: ARG001 - as all of them
    width = round(operator.output_elements_per_row / operator.positions_per_row)
    entries = operator.weight_elements // width
    loops = (
        (Loop.BATCH, 0),
        (Loop.WIDTH, width),
        (Loop.ENTRIES, entries),
        (Loop.SEQUENCE, operator.positions_per_row),
    )
    weight = ((Loop.ENTRIES, Axis.INNER), (Loop.WIDTH, Axis.WIDTH))
    return Operation(
        operator.name,
        loops,
        IndexedTensor((_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH)), operator.output_elements_per_row),
        weight=IndexedTensor(weight, operator.weight_elements),
    )


def _added_embedding(operator: Operator) -> Operation:
    """Build an embedding added to an earlier one; every device has a whole table of score biases, and a tensor degree uses it by heads."""
    axes = (_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH))
    values = operator.output_elements_per_row
    weight_axes = ((Loop.WIDTH, Axis.WIDTH),) if values else ()
    return Operation(
        operator.name,
        tuple((loop, 0) for loop, _ in axes),
        IndexedTensor(axes, values),
        (IndexedTensor(axes, values),),
        IndexedTensor(weight_axes, operator.weight_elements),
        is_trivial=True,
        tensor_parallel_loops=() if values else (Loop.WIDTH,),
    )


def _routing(operator: Operator, shapes: FamilyShapes) -> Operation:
    """Build the choice of experts, the dispatch of tokens or their combination.

    The choice reads all experts of a token; its balance loss counts the choices over a row's positions.
    """
    tokens, chosen = (_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH)), (_BATCH, _SEQUENCE)
    pairs = operator.positions_per_row
    if operator.name == "choice":
        return Operation(
            operator.name,
            ((Loop.BATCH, 0), (Loop.SEQUENCE, pairs)),
            IndexedTensor(chosen, operator.output_elements_per_row),
            (IndexedTensor(chosen, operator.input_elements_per_row),),
            internal_sums=(IndexedTensor((_BATCH,), shapes.experts), (Loop.SEQUENCE,)),
        )
    dispatches = operator.name == "dispatch"
    hidden = round(
        (operator.output_elements_per_row if dispatches else operator.saved_elements_per_row - pairs) / pairs
    )
    whole = IndexedTensor((*tokens, _EXPERT), pairs * hidden)
    plain = operator.input_elements_per_row if dispatches else operator.output_elements_per_row
    choice = IndexedTensor(chosen, pairs)
    return Operation(
        operator.name,
        (
            (Loop.BATCH, 0),
            (Loop.WIDTH, hidden),
            (Loop.EXPERT, shapes.experts),
            (Loop.SEQUENCE, round(plain / hidden)),
        ),
        whole if dispatches else IndexedTensor(tokens, plain),
        (IndexedTensor(tokens, plain), choice) if dispatches else (whole, choice),
    )


_NESTS: Final[Mapping[OperatorKind, Callable[[Operator, FamilyShapes], Operation]]] = {
    OperatorKind.MATMUL: _matmul,
    OperatorKind.BATCHED_MATMUL: _batched_matmul,
    OperatorKind.CONVOLUTION: _convolution,
    OperatorKind.ATTENTION: _attention,
    OperatorKind.SOFTMAX: _softmax,
    OperatorKind.NORMALISATION: _normalisation,
    OperatorKind.ELEMENT_WISE: _element_wise,
    OperatorKind.EMBEDDING: _lookup,
    OperatorKind.CROSS_ENTROPY: _cross_entropy,
    OperatorKind.ROUTING: _routing,
}
