"""Parallel algorithms of every operator on a mesh shape, and their sharding specs (paper §4.1, Table 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.cost.operators.operator_graph import OperatorGraph
from trainwright.cost.operators.sharding_specs import Indices, divided_axes, layout_number
from trainwright.loop_nests.layer_wiring import Source
from trainwright.loop_nests.operations import Axis, IndexedTensor, Operation
from trainwright.operator_shardings import Loop, LoopMapping


@dataclass(frozen=True)
class AlgorithmSpace:
    """Sharding constraints on a mesh.

    Attributes:
        rows: rows per micro-batch over the whole mesh.
        divides_sequences: whether the sequence axis may be sharded.
    """

    shape: tuple[int, int]
    rows: int
    divides_sequences: bool = False

    def fits(self, size: int, dimensions: Sequence[int]) -> bool:
        """Return whether `size` divides evenly over the dimensions."""
        return size % math.prod(self.shape[d] for d in dimensions) == 0

    def batch_fits(self) -> tuple[bool, bool, bool]:
        """Return whether the rows divide evenly over dimension 0, 1 and both; algorithms depend on the rows only by these."""
        return self.fits(self.rows, (0,)), self.fits(self.rows, (1,)), self.fits(self.rows, (0, 1))


def input_layouts(space: AlgorithmSpace, width: int) -> list[int]:
    """Return layouts in which a tensor may enter a layer; `width` is a common divisor of its last axis' possible sizes."""
    axes = [Axis.BATCH, Axis.WIDTH, *([Axis.SEQUENCE] if space.divides_sequences else [])]
    sizes = {Axis.BATCH: space.rows, Axis.WIDTH: width, Axis.SEQUENCE: 0}
    options = [[Axis.NOTHING, *axes] if space.shape[d] > 1 else [Axis.NOTHING] for d in (0, 1)]
    return [
        layout_number(first, second)
        for first in options[0]
        for second in options[1]
        if _divides(space, [(axis, sizes[axis]) for axis in axes], (first, second))
    ]


def mappings(operation: Operation, space: AlgorithmSpace) -> list[LoopMapping]:
    """Return all parallel algorithms of an operator: the loop that each mesh dimension shards.

    Heavy operators are sharded over all devices, or over as many as their sizes allow.
    """
    loops = [loop for loop, _ in operation.loops if space.divides_sequences or loop is not Loop.SEQUENCE]
    sizes = [(loop, operation.max_parts(loop, space.rows)) for loop in loops]
    options = [[None, *loops] if space.shape[d] > 1 else [None] for d in (0, 1)]
    loop_mappings: list[LoopMapping] = [
        (first, second) for first in options[0] for second in options[1] if _divides(space, sizes, (first, second))
    ]
    if not operation.is_heavy:
        return loop_mappings
    most = max(_degree(space, mapping) for mapping in loop_mappings)
    return [mapping for mapping in loop_mappings if _degree(space, mapping) == most]


def is_possible(operation: Operation, mapping: LoopMapping, space: AlgorithmSpace) -> bool:
    """Return whether the mesh divides the operator's loops so: they are its own, and their sizes are multiples."""
    sizes = [(loop, operation.max_parts(loop, space.rows)) for loop, _ in operation.loops]
    own = {None, *(loop for loop, _ in sizes)}
    return own.issuperset(mapping) and _divides(space, sizes, mapping)


def _divides(space: AlgorithmSpace, sizes: Sequence[tuple[object, int]], pair: tuple[object, object]) -> bool:
    return all(
        space.fits(size, [d for d in (0, 1) if pair[d] is loop])
        for loop, size in sizes
        if loop is pair[0] or loop is pair[1]
    )


def _degree(space: AlgorithmSpace, mapping: LoopMapping) -> int:
    return math.prod(space.shape[d] for d in (0, 1) if mapping[d] is not None)


@dataclass(frozen=True)
class OperatorAlgorithms:
    """Sharding of one operator under each algorithm of its node; arrays are `[algorithm]`.

    Attributes:
        output_layouts, operand_layouts, weight_layouts, internal_layouts: layout numbers.
        output_sums, operand_sums, weight_sums, internal_sums: mesh dimensions over which partial sums of the tensor
            (for operands and weights, of its gradient) are reduced, as bits: 1 for dimension 0, 2 for dimension 1.
    """

    mappings: tuple[LoopMapping, ...]
    output_layouts: Indices
    output_sums: Indices
    operand_layouts: tuple[Indices, ...]
    operand_sums: tuple[Indices, ...]
    weight_layouts: Indices | None
    weight_sums: Indices | None
    internal_layouts: Indices | None
    internal_sums: Indices | None

    @classmethod
    def of(cls, operation: Operation, loop_mappings: Sequence[LoopMapping]) -> OperatorAlgorithms:
        """Derive layouts and partial sums: a sharded loop that does not index a tensor leaves partial sums of it."""
        summed = operation.internal_sums
        return cls(
            tuple(loop_mappings),
            _layouts(operation.output, loop_mappings),
            _partial_sums(operation.output, loop_mappings),
            tuple(_layouts(operand, loop_mappings) for operand in operation.operands),
            tuple(_partial_sums(operand, loop_mappings) for operand in operation.operands),
            None if operation.weight is None else _layouts(operation.weight, loop_mappings),
            None if operation.weight is None else _partial_sums(operation.weight, loop_mappings),
            None if summed is None else _layouts(summed[0], loop_mappings),
            None if summed is None else _partial_sums(summed[0], loop_mappings, only=summed[1]),
        )


def _layouts(tensor: IndexedTensor, loop_mappings: Sequence[LoopMapping]) -> Indices:
    return np.array(
        [layout_number(tensor.axis(first), tensor.axis(second)) for first, second in loop_mappings], dtype=np.int64
    )


def _partial_sums(
    tensor: IndexedTensor, loop_mappings: Sequence[LoopMapping], only: Sequence[Loop] | None = None
) -> Indices:
    def bit(loop: Loop | None) -> int:
        return int(loop is not None and (only is None or loop in only) and tensor.axis(loop) is Axis.NOTHING)

    return np.array([bit(first) + 2 * bit(second) for first, second in loop_mappings], dtype=np.int64)


@dataclass(frozen=True)
class GraphAlgorithms:
    """Sharding of all operators of a layer under the algorithms of their nodes.

    Attributes:
        counts: number of algorithms per node.
        operators: per operator.
        inputs: layouts of each tensor that enters.
    """

    graph: OperatorGraph
    counts: tuple[int, ...]
    operators: tuple[OperatorAlgorithms, ...]
    inputs: tuple[Indices, ...]

    @classmethod
    def of(cls, graph: OperatorGraph, space: AlgorithmSpace, width: int) -> GraphAlgorithms:
        """Enumerate the algorithms on a mesh shape; `width` as in `input_layouts`."""
        entering = [input_layouts(space, width)] * graph.wired.inputs
        return cls._of(graph, entering, lambda index: mappings(graph.operations[index], space))

    @classmethod
    def chosen(
        cls, graph: OperatorGraph, entering: Sequence[int], mapping_of: Sequence[LoopMapping]
    ) -> GraphAlgorithms:
        """Return one algorithm a node, given the mapping of each operator and the layout of each tensor that enters."""
        return cls._of(graph, [[layout] for layout in entering], lambda index: [mapping_of[index]])

    @classmethod
    def _of(
        cls,
        graph: OperatorGraph,
        layouts_entering: Sequence[Sequence[int]],
        mappings_of: Callable[[int], Sequence[LoopMapping]],
    ) -> GraphAlgorithms:
        entering = tuple(np.array(layouts, dtype=np.int64) for layouts in layouts_entering)
        operators: dict[int, OperatorAlgorithms] = {}
        counts: list[int] = []
        for number, node in enumerate(graph.nodes):
            if node.leader is None:
                counts.append(len(entering[number]))
            else:
                loop_mappings = mappings_of(node.leader)
                operators[node.leader] = OperatorAlgorithms.of(graph.operations[node.leader], loop_mappings)
                counts.append(len(loop_mappings))
            for follower in node.followers:
                operation = graph.operations[follower.operation]
                source = follower.source
                layouts = entering[-1 - source] if source < 0 else operators[source].output_layouts
                followed = _follower_mappings(operation.operands[follower.operand], layouts)
                operators[follower.operation] = OperatorAlgorithms.of(operation, followed)
        ordered = tuple(operators[index] for index in range(len(graph.operations)))
        return cls(graph, tuple(counts), ordered, entering)

    def output_layouts(self, source: Source) -> Indices:
        """Return `[algorithm of its node]` layouts of an operator's output, or of a tensor that enters."""
        return self.inputs[-1 - source] if source < 0 else self.operators[source].output_layouts


def _follower_mappings(operand: IndexedTensor, layouts: Indices) -> list[LoopMapping]:
    """Return the mappings of an operator whose operand has the given layouts."""
    followed: list[LoopMapping] = []
    for number in layouts:
        first, second = (
            None if axis == Axis.NOTHING else operand.loop(Axis(axis)) for axis in divided_axes(int(number))
        )
        followed.append((first, second))
    return followed
