"""Degrees of a plan that come nearest to chosen shardings of operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainwright.cost.operators.algorithm_costs import Rewriting
from trainwright.cost.operators.layer_specs import LayerAssignment
from trainwright.cost.operators.parallel_algorithms import GraphAlgorithms
from trainwright.loop_nests.operations import Operation
from trainwright.operator_shardings import Loop, LoopMapping, SpanSpecs
from trainwright.plan import LayerRun
from trainwright.strategy import RankOrder, Sharding, Strategy


@dataclass(frozen=True, slots=True)
class NearestDegrees:
    """Nearest equivalent of consecutive layers' specs in degrees of a plan.

    Attributes:
        exact: it says the same as the operators' specs.
    """

    first: int
    count: int
    tensor: int
    data: int
    order: RankOrder
    sharding: Sharding
    exact: bool

    @property
    def end(self) -> int:
        """Index after the last layer."""
        return self.first + self.count

    def layer_run(self, rows: int) -> LayerRun:
        """Return the run for a micro-batch of `rows`. Raises ValueError if the replicas cannot share them evenly."""
        if rows % self.data:
            raise ValueError(f"{rows} rows cannot be shared evenly by {self.data} replicas")
        parts = (rows // self.data,) * self.data
        return LayerRun(self.first, self.count, Strategy(self.tensor, self.data, self.order, self.sharding), parts)


@dataclass(frozen=True, slots=True)
class SpanSharding:
    """Operators' shardings of consecutive layers, and the degrees of a plan that come nearest."""

    specs: SpanSpecs
    degrees: tuple[NearestDegrees, ...]

    @property
    def exact(self) -> bool:
        """True if the degrees say all of it."""
        return all(run.exact for run in self.degrees)


@dataclass(frozen=True)
class DegreesBuilder:
    """Builder of the degrees that come nearest to one layer kind's assignment on one mesh shape.

    Attributes:
        rewriting: all-reduces that end as a reduce-scatter.
        divides_all: whether the runtime shards the whole layer by a tensor degree although it is not tensor parallel.
    """

    algorithms: GraphAlgorithms
    shape: tuple[int, int]
    rewriting: Rewriting = field(default_factory=Rewriting)
    divides_all: bool = False

    def degrees(self, first: int, count: int, assignment: LayerAssignment) -> NearestDegrees:
        """Return the tensor and data degree that fit most of a layer's work, and whether they express all of it."""
        graph, weights = self.algorithms.graph, dict[tuple[bool, bool], float]()
        chosen = [self._mapping(index, assignment) for index in range(len(graph.operations))]
        for operation, mapping in zip(graph.operations, chosen, strict=True):
            key = (mapping[0] is Loop.BATCH, mapping[1] is Loop.BATCH)
            weight = operation.flops_per_row if operation.is_heavy else operation.moved_per_row * 1e-9
            weights[key] = weights.get(key, 0.0) + weight + 1e-12 * math.prod(self._sizes(key))
        batch = max(weights, key=lambda key: weights[key])
        data = math.prod(self._sizes(batch))
        tensor = math.prod(self.shape) // data
        modes = [
            mode for (mode, _), node in zip(assignment, graph.nodes, strict=True) if self._has_weight(node.operations)
        ]
        sharding = Sharding.NONE
        if data > 1:
            gathered = bool(modes) and sum(modes) * 2 > len(modes)
            sharding = Sharding.ZERO3 if gathered else Sharding.ZERO2 if self.rewriting.gradients else Sharding.NONE
        one_held = len(set(modes)) <= 1
        exact = one_held and all(
            self.expresses(operation, mapping, batch)
            for operation, mapping in zip(graph.operations, chosen, strict=True)
        )
        inner = self.shape[1] > 1 and not batch[1]
        order = RankOrder.TENSOR_INNER if inner or data == 1 or tensor == 1 else RankOrder.DATA_INNER
        return NearestDegrees(first, count, tensor, data, order, sharding, exact)

    def _mapping(self, index: int, assignment: LayerAssignment) -> LoopMapping:
        algorithm = assignment[self.algorithms.graph.node_of[index]][1]
        return self.algorithms.operators[index].mappings[algorithm]

    def _sizes(self, batch: tuple[bool, bool]) -> list[int]:
        return [size for size, is_batch in zip(self.shape, batch, strict=True) if is_batch]

    def _has_weight(self, operations: Sequence[int]) -> bool:
        return any(self.algorithms.graph.operations[index].weight is not None for index in operations)

    def expresses(self, operation: Operation, mapping: LoopMapping, batch: tuple[bool, bool]) -> bool:
        """Return whether the degrees make the runtime shard the operator so: rows over replicas, its split over tensor ranks."""
        for size, loop, is_batch in zip(self.shape, mapping, batch, strict=True):
            if size == 1:
                continue
            if is_batch != (loop is Loop.BATCH):
                return False
            if not is_batch and loop not in (operation.tensor_parallel_loops or (None,)) and not self.divides_all:
                return False
        return True


def merge_equal_runs(degrees: Sequence[NearestDegrees]) -> tuple[NearestDegrees, ...]:
    """Merge neighbours with equal degrees into one run."""
    runs: list[NearestDegrees] = []
    for run in degrees:
        last = runs[-1] if runs else None
        if last is not None and replace(last, first=run.first, count=run.count) == run:
            runs[-1] = replace(last, count=last.count + run.count)
        else:
            runs.append(run)
    return tuple(runs)
