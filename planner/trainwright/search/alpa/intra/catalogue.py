"""The loop nests of the operators that layers are made of, by kind (paper §4.1, Table 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainwright.layer import Operator, OperatorKind, Split
from trainwright.search.alpa.intra.layouts import Axis
from trainwright.search.alpa.intra.operation import Loop, Operation, Tensor

KERNEL_AREAS: Final[Mapping[str, int]] = {"convolve": 9, "stem": 49}
"""Of convolutions by name, where it is not 1: weights are kernel area × channels × filters."""

FLOAT32_BYTES = 4

_BATCH, _SEQUENCE, _EXPERT = (Loop.BATCH, Axis.BATCH), (Loop.SEQUENCE, Axis.SEQUENCE), (Loop.EXPERT, Axis.EXPERT)


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a family tells beside its operators.

    Attributes:
        parts: into which attention can be divided (heads of keys and values).
        heads: of queries; None where they differ by stage, and keys are as many as queries.
        experts: how many there are; 0 outside mixtures of experts.
    """

    parts: int
    heads: int | None = None
    experts: int = 0


def operation(operator: Operator, shapes: Shapes, *, adds: bool = False) -> Operation:
    """The loop nest of an operator.

    `adds` says that what it makes is added to what another branch made: a residual, or a further look-up.
    """
    if adds and operator.kind is OperatorKind.EMBEDDING:
        found = _added_table(operator)
    elif adds:
        found = _element_wise(operator, shapes)
        found = replace(found, operands=found.operands * 2)
    else:
        found = _NESTS[operator.kind](operator, shapes)
    return replace(
        found,
        flops_per_row=operator.forward_flops_per_row,
        moved_per_row=operator.input_elements_per_row + operator.output_elements_per_row,
        saved_elements_per_row=operator.saved_elements_per_row,
        saved_bytes_per_row=operator.saved_bytes_per_row,
    )


def is_of_experts(operator: Operator) -> bool:
    """Whether it works on tokens that were dispatched to experts."""
    return operator.name.startswith("experts_")


def _matmul(operator: Operator, shapes: Shapes) -> Operation:
    inner = round(operator.input_elements_per_row / operator.positions_per_row)
    outer = round(operator.output_elements_per_row / operator.positions_per_row)
    loops = [(Loop.BATCH, 0), (Loop.IN, inner), (Loop.OUT, outer), (Loop.SEQUENCE, operator.positions_per_row)]
    outside = [_BATCH, _SEQUENCE]
    weight = [(Loop.IN, Axis.INNER), (Loop.OUT, Axis.WIDTH)]
    if is_of_experts(operator):
        loops[-1] = (Loop.EXPERT, shapes.experts)
        outside[-1] = _EXPERT
        weight.append(_EXPERT)
    return _product(operator, tuple(loops), tuple(outside), tuple(weight))


def _convolution(operator: Operator, shapes: Shapes) -> Operation:  # noqa: ARG001 - as all of them
    """Pixels are not divided: batch, channels in and channels out are (paper Fig. 13)."""
    filters = round(operator.output_elements_per_row / operator.positions_per_row)
    products = round(operator.forward_flops_per_row / operator.positions_per_row / 2)
    channels = products // filters // KERNEL_AREAS.get(operator.name, 1)
    loops = ((Loop.BATCH, 0), (Loop.IN, channels), (Loop.OUT, filters))
    return _product(operator, loops, (_BATCH,), ((Loop.IN, Axis.INNER), (Loop.OUT, Axis.WIDTH)))


def _product(
    operator: Operator,
    loops: tuple[tuple[Loop, int], ...],
    outside: tuple[tuple[Loop, Axis], ...],
    weight: tuple[tuple[Loop, Axis], ...],
) -> Operation:
    splits = {Split.COLUMN: (Loop.OUT,), Split.ROW: (Loop.IN,)}
    return Operation(
        operator.name,
        loops,
        Tensor((*outside, (Loop.OUT, Axis.WIDTH)), operator.output_elements_per_row),
        (Tensor((*outside, (Loop.IN, Axis.WIDTH)), operator.input_elements_per_row),),
        Tensor(weight, operator.weight_elements),
        heavy=True,
        split=splits.get(operator.split, ()),
    )


def _attention(operator: Operator, shapes: Shapes) -> Operation:
    """Queries against all keys and values; dividing the queries' positions needs keys and values whole."""
    queries = operator.output_elements_per_row
    return _over_heads(operator, shapes, queries, operator.input_elements_per_row - queries)


def _batched_matmul(operator: Operator, shapes: Shapes) -> Operation:
    """Scores (queries × keys) or context (scores × values), by the head.

    From the FLOPs, 2 × queries × keys × width, follows how much of the elements read is either operand.
    """
    products, positions = operator.forward_flops_per_row / 2, operator.positions_per_row
    read, written = operator.input_elements_per_row, operator.output_elements_per_row
    if shapes.heads is not None:
        first = products * shapes.heads / written * positions
    else:
        first = read / 2 if operator.name == "scores" else read - written
    return _over_heads(operator, shapes, first, read - first)


def _over_heads(operator: Operator, shapes: Shapes, first: float, second: float) -> Operation:
    heads = (Loop.HEADS, Axis.WIDTH)
    return Operation(
        operator.name,
        ((Loop.BATCH, 0), (Loop.HEADS, shapes.parts), (Loop.SEQUENCE, operator.positions_per_row)),
        Tensor((_BATCH, _SEQUENCE, heads), operator.output_elements_per_row),
        (Tensor((_BATCH, _SEQUENCE, heads), first), Tensor((_BATCH, heads), second)),
        heavy=True,
        split=(Loop.HEADS,),
    )


def _element_wise(operator: Operator, shapes: Shapes) -> Operation:  # noqa: ARG001 - as all of them
    axes = (_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH), _EXPERT)
    values = operator.output_elements_per_row
    held = Tensor(((Loop.WIDTH, Axis.WIDTH), _EXPERT), operator.weight_elements)
    return Operation(
        operator.name,
        tuple((loop, 0) for loop, _ in axes if loop is not Loop.EXPERT),  # by experts it divides only what it follows
        Tensor(axes, values),
        (Tensor(axes, values),),
        held if operator.weight_elements else None,
        trivial=True,
        split=() if operator.split is Split.NONE else (Loop.WIDTH,),
    )


def _normalisation(operator: Operator, shapes: Shapes) -> Operation:
    """Moments are sums over the width, two or one for each position; batch normalisation has none of them."""
    found = _element_wise(operator, shapes)
    moments = operator.saved_bytes_per_row / FLOAT32_BYTES
    return replace(found, summed=(Tensor((_BATCH, _SEQUENCE), moments), (Loop.WIDTH,)) if moments else None)


def _softmax(operator: Operator, shapes: Shapes) -> Operation:
    """Of scores, whose width is heads here; keys are not divided."""
    return _element_wise(operator, shapes)


def _cross_entropy(operator: Operator, shapes: Shapes) -> Operation:  # noqa: ARG001 - as all of them
    """Its maximum, its sum of exponentials and the target's logit are sums over the classes (its width)."""
    axes = (_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH))
    return Operation(
        operator.name,
        tuple((loop, 0) for loop, _ in axes),
        Tensor((_BATCH,), operator.output_elements_per_row),
        (Tensor(axes, operator.input_elements_per_row),),
        summed=(Tensor((_BATCH, _SEQUENCE), 3 * operator.positions_per_row), (Loop.WIDTH,)),
        trivial=True,
    )


def _lookup(operator: Operator, shapes: Shapes) -> Operation:  # noqa: ARG001 - as all of them
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
        Tensor((_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH)), operator.output_elements_per_row),
        weight=Tensor(weight, operator.weight_elements),
    )


def _added_table(operator: Operator) -> Operation:
    """A look-up added to what was there before; a table of scores' biases is looked up whole by every device."""
    axes = (_BATCH, _SEQUENCE, (Loop.WIDTH, Axis.WIDTH))
    values = operator.output_elements_per_row
    held = ((Loop.WIDTH, Axis.WIDTH),) if values else ()
    return Operation(
        operator.name,
        tuple((loop, 0) for loop, _ in axes),
        Tensor(axes, values),
        (Tensor(axes, values),),
        Tensor(held, operator.weight_elements),
        trivial=True,
    )


def _routing(operator: Operator, shapes: Shapes) -> Operation:
    """Choice of experts (follows the router's output), dispatch of tokens to experts, and their combination."""
    width = (Loop.WIDTH, Axis.WIDTH)
    tokens, chosen = (_BATCH, _SEQUENCE, width), (_BATCH, _SEQUENCE)
    if operator.name == "choice":
        values = operator.output_elements_per_row
        return Operation(
            operator.name,
            tuple((loop, 0) for loop, _ in tokens),
            Tensor(chosen, values),
            (Tensor(tokens, operator.input_elements_per_row),),
            summed=(Tensor(chosen, 2 * values), (Loop.WIDTH,)),
            trivial=True,
        )
    pairs = operator.positions_per_row
    dispatches = operator.name == "dispatch"
    hidden = round(
        (operator.output_elements_per_row if dispatches else operator.saved_elements_per_row - pairs) / pairs
    )
    whole = Tensor((*tokens, _EXPERT), pairs * hidden)
    plain = operator.input_elements_per_row if dispatches else operator.output_elements_per_row
    choice = Tensor(chosen, pairs)
    return Operation(
        operator.name,
        ((Loop.BATCH, 0), (Loop.WIDTH, hidden), (Loop.EXPERT, shapes.experts), (Loop.SEQUENCE, pairs)),
        whole if dispatches else Tensor(tokens, plain),
        (Tensor(tokens, plain), choice) if dispatches else (whole, choice),
    )


_NESTS: Final[Mapping[OperatorKind, Callable[[Operator, Shapes], Operation]]] = {
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
