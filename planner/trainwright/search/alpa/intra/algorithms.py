"""The parallel algorithms of every node on a mesh shape, and the layouts that follow from them (paper §4.1, Table 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.intra.graph import OperatorGraph
from trainwright.search.alpa.intra.layouts import Axis, layout
from trainwright.search.alpa.intra.operation import Loop, Operation, Tensor
from trainwright.search.alpa.intra.wiring import Source

Indices = NDArray[np.int64]

Mapping = tuple[Loop | None, Loop | None]
"""The loop that mesh dimension 0 and 1 divide; None: the devices along it compute the same."""


@dataclass(frozen=True)
class Space:
    """What may be divided on a mesh.

    Attributes:
        shape: of the mesh.
        rows: of a micro-batch over the whole mesh.
        sequences: whether positions of a sequence may be divided.
    """

    shape: tuple[int, int]
    rows: int
    sequences: bool = False

    def fits(self, size: int, dimensions: Sequence[int]) -> bool:
        """Whether something of that size divides evenly over those dimensions."""
        return size % math.prod(self.shape[d] for d in dimensions) == 0

    def batch_fits(self) -> tuple[bool, bool, bool]:
        """Whether the rows divide over dimension 0, 1 and both: all that algorithms depend on of the rows."""
        return self.fits(self.rows, (0,)), self.fits(self.rows, (1,)), self.fits(self.rows, (0, 1))


def input_layouts(space: Space, width: int) -> list[int]:
    """Layouts in which a tensor may enter a layer; `width` is a common divisor of what its last axis may have."""
    axes = [Axis.BATCH, Axis.WIDTH, *([Axis.SEQUENCE] if space.sequences else [])]
    sizes = {Axis.BATCH: space.rows, Axis.WIDTH: width, Axis.SEQUENCE: 0}
    options = [[Axis.NOTHING, *axes] if space.shape[d] > 1 else [Axis.NOTHING] for d in (0, 1)]
    return [
        layout(first, second)
        for first in options[0]
        for second in options[1]
        if _divides(space, [(axis, sizes[axis]) for axis in axes], (first, second))
    ]


def mappings(operation: Operation, space: Space) -> list[Mapping]:
    """All parallel algorithms of an operator: which loop every mesh dimension divides.

    Heavy operators are divided over all devices; where sizes do not allow it, over as many as they do.
    """
    loops = [loop for loop, _ in operation.loops if space.sequences or loop is not Loop.SEQUENCE]
    sizes = [(loop, operation.size(loop, space.rows)) for loop in loops]
    options = [[None, *loops] if space.shape[d] > 1 else [None] for d in (0, 1)]
    found: list[Mapping] = [
        (first, second) for first in options[0] for second in options[1] if _divides(space, sizes, (first, second))
    ]
    if not operation.heavy:
        return found
    most = max(_degree(space, mapping) for mapping in found)
    return [mapping for mapping in found if _degree(space, mapping) == most]


def _divides(space: Space, sizes: Sequence[tuple[object, int]], pair: tuple[object, object]) -> bool:
    return all(
        space.fits(size, [d for d in (0, 1) if pair[d] is one])
        for one, size in sizes
        if one is pair[0] or one is pair[1]
    )


def _degree(space: Space, mapping: Mapping) -> int:
    return math.prod(space.shape[d] for d in (0, 1) if mapping[d] is not None)


@dataclass(frozen=True)
class OperatorAlgorithms:
    """One operator under every algorithm of its node; arrays are by [algorithm].

    Attributes:
        mappings: by algorithm.
        output, operands, weight: layouts.
        output_sums, operand_sums, weight_sums, own_sums: over which mesh dimensions partial sums of the tensor (of
            operands and weights: of its gradient) are summed, as bits: 1 for dimension 0, 2 for dimension 1.
    """

    mappings: tuple[Mapping, ...]
    output: Indices
    output_sums: Indices
    operands: tuple[Indices, ...]
    operand_sums: tuple[Indices, ...]
    weight: Indices | None
    weight_sums: Indices | None
    own: Indices | None
    own_sums: Indices | None

    @classmethod
    def of(cls, operation: Operation, found: Sequence[Mapping]) -> OperatorAlgorithms:
        """From the mappings alone: a loop that does not index a tensor leaves partial sums of it."""
        summed = operation.summed
        return cls(
            tuple(found),
            _layouts(operation.output, found),
            _sums(operation.output, found),
            tuple(_layouts(operand, found) for operand in operation.operands),
            tuple(_sums(operand, found) for operand in operation.operands),
            None if operation.weight is None else _layouts(operation.weight, found),
            None if operation.weight is None else _sums(operation.weight, found),
            None if summed is None else _layouts(summed[0], found),
            None if summed is None else _sums(summed[0], found, only=summed[1]),
        )


def _layouts(tensor: Tensor, found: Sequence[Mapping]) -> Indices:
    return np.array([layout(tensor.axis(first), tensor.axis(second)) for first, second in found], dtype=np.int64)


def _sums(tensor: Tensor, found: Sequence[Mapping], only: Sequence[Loop] | None = None) -> Indices:
    def bit(loop: Loop | None) -> int:
        return int(loop is not None and (only is None or loop in only) and tensor.axis(loop) is Axis.NOTHING)

    return np.array([bit(first) + 2 * bit(second) for first, second in found], dtype=np.int64)


@dataclass(frozen=True)
class GraphAlgorithms:
    """All operators of a layer under the algorithms of their nodes.

    Attributes:
        counts: algorithms by node.
        operators: by operator.
        inputs: by tensor that enters: its layouts.
    """

    graph: OperatorGraph
    counts: tuple[int, ...]
    operators: tuple[OperatorAlgorithms, ...]
    inputs: tuple[Indices, ...]

    @classmethod
    def of(cls, graph: OperatorGraph, space: Space, width: int) -> GraphAlgorithms:
        """On a mesh shape; `width` as in `input_layouts`."""
        entering: Indices = np.array(input_layouts(space, width), dtype=np.int64)
        operators: dict[int, OperatorAlgorithms] = {}
        counts: list[int] = []
        for node in graph.nodes:
            if node.leader is None:
                counts.append(len(entering))
            else:
                found = mappings(graph.operations[node.leader], space)
                operators[node.leader] = OperatorAlgorithms.of(graph.operations[node.leader], found)
                counts.append(len(found))
            for follower in node.followers:
                operation = graph.operations[follower.operation]
                held = entering if follower.source < 0 else operators[follower.source].output
                followed = _followed(operation.operands[follower.operand], held)
                operators[follower.operation] = OperatorAlgorithms.of(operation, followed)
        ordered = tuple(operators[index] for index in range(len(graph.operations)))
        return cls(graph, tuple(counts), ordered, (entering,) * graph.wired.inputs)

    def output(self, source: Source) -> Indices:
        """[algorithm of its node] layouts of an operator's output, or of a tensor that enters."""
        return self.inputs[-1 - source] if source < 0 else self.operators[source].output


def _followed(operand: Tensor, held: Indices) -> list[Mapping]:
    """The mappings of an operator whose operand has these layouts."""
    found: list[Mapping] = []
    for number in held:
        first, second = (
            None if axis == Axis.NOTHING else operand.loop(Axis(axis)) for axis in divmod(int(number), len(Axis))
        )
        found.append((first, second))
    return found
