"""From chosen algorithms to a document: the specs of every operator, and the nearest degrees of the plan document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainwright.operator_specs import Degrees, LayerSpecs, OperatorSpecs
from trainwright.plan import Order, Sharding
from trainwright.search.alpa.intra.algorithms import GraphAlgorithms, Mapping
from trainwright.search.alpa.intra.layouts import Axis, spec
from trainwright.search.alpa.intra.operation import Loop, Operation, Tensor
from trainwright.search.alpa.intra.rewriting import Rewriting

Assignment = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Describer:
    """Puts the assignments of one layer kind on one mesh shape into words.

    Attributes:
        rewriting: which sums end scattered.
        divides_all: whether the runtime divides the whole layer by a tensor degree though it is not tensor parallel.
    """

    algorithms: GraphAlgorithms
    shape: tuple[int, int]
    rewriting: Rewriting = field(default_factory=Rewriting)
    divides_all: bool = False

    def layer(self, layer: int, kind: str, assignment: Assignment) -> LayerSpecs:
        """The operators of a layer."""
        graph, found = self.algorithms.graph, []
        for index, operation in enumerate(graph.operations):
            held, algorithm = assignment[graph.node_of[index]]
            found.append(self._operator(index, operation, held, algorithm))
        return LayerSpecs(layer, kind, tuple(found))

    def _operator(self, index: int, operation: Operation, held: int, algorithm: int) -> OperatorSpecs:
        found = self.algorithms.operators[index]
        mapping = found.mappings[algorithm]
        loops = dict.fromkeys(loop for loop in mapping if loop is not None)
        words = [
            f"{loop}→{''.join(str(d) for d in (0, 1) if mapping[d] is loop and self.shape[d] > 1)}" for loop in loops
        ]
        operands = tuple(
            spec(int(layouts[algorithm]), _axes(operand))
            for operand, layouts in zip(operation.operands, found.operands, strict=True)
        )
        output = spec(int(found.output[algorithm]), _axes(operation.output))
        scattered = self.rewriting.activations and bool(found.output_sums[algorithm])
        plain = OperatorSpecs(
            operation.name, " ".join(words) or "replicated", output, operands, sum_scattered=scattered
        )
        if operation.weight is None or found.weight is None or found.weight_sums is None:
            return plain
        replicated = bool(found.weight_sums[algorithm])
        return replace(
            plain,
            weight=spec(int(found.weight[algorithm]), _axes(operation.weight)),
            weight_held="gathered" if held and replicated else "whole",
            update_sharded=replicated and (self.rewriting.gradients or held == 1),
        )

    def degrees(self, layer: int, assignment: Assignment) -> Degrees:
        """The tensor and data degree that fits most of the layer's work, and whether they say all of it."""
        graph, weights = self.algorithms.graph, dict[tuple[bool, bool], float]()
        chosen = [self._mapping(index, assignment) for index in range(len(graph.operations))]
        for operation, mapping in zip(graph.operations, chosen, strict=True):
            key = (mapping[0] is Loop.BATCH, mapping[1] is Loop.BATCH)
            weight = operation.flops_per_row if operation.heavy else operation.moved_per_row * 1e-9
            weights[key] = weights.get(key, 0.0) + weight + 1e-12 * math.prod(self._sizes(key))
        batch = max(weights, key=lambda key: weights[key])
        data = math.prod(self._sizes(batch))
        tensor = math.prod(self.shape) // data
        held = [
            held for (held, _), node in zip(assignment, graph.nodes, strict=True) if self._has_weight(node.operations)
        ]
        sharding = Sharding.NONE
        if data > 1:
            gathered = bool(held) and sum(held) * 2 > len(held)
            sharding = Sharding.ZERO3 if gathered else Sharding.ZERO2 if self.rewriting.gradients else Sharding.NONE
        one_held = len(set(held)) <= 1
        exact = one_held and all(
            self._is_said(operation, mapping, batch)
            for operation, mapping in zip(graph.operations, chosen, strict=True)
        )
        inner = self.shape[1] > 1 and not batch[1]
        order = Order.TENSOR_INNER if inner or data == 1 or tensor == 1 else Order.DATA_INNER
        return Degrees(layer, 1, tensor, data, order, sharding, exact)

    def _mapping(self, index: int, assignment: Assignment) -> Mapping:
        algorithm = assignment[self.algorithms.graph.node_of[index]][1]
        return self.algorithms.operators[index].mappings[algorithm]

    def _sizes(self, batch: tuple[bool, bool]) -> list[int]:
        return [size for size, is_batch in zip(self.shape, batch, strict=True) if is_batch]

    def _has_weight(self, operations: Sequence[int]) -> bool:
        return any(self.algorithms.graph.operations[index].weight is not None for index in operations)

    def _is_said(self, operation: Operation, mapping: Mapping, batch: tuple[bool, bool]) -> bool:
        """Whether the degrees make the runtime divide this operator so: rows among replicas, and its split among the rest."""
        for size, loop, is_batch in zip(self.shape, mapping, batch, strict=True):
            if size == 1:
                continue
            if is_batch != (loop is Loop.BATCH):
                return False
            if not is_batch and loop not in (operation.split or (None,)) and not self.divides_all:
                return False
        return True


def joined(found: Sequence[Degrees]) -> tuple[Degrees, ...]:
    """Neighbours with the same degrees as one run."""
    runs: list[Degrees] = []
    for one in found:
        last = runs[-1] if runs else None
        if last is not None and replace(last, first=one.first, count=1) == one:
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(one)
    return tuple(runs)


def _axes(tensor: Tensor) -> tuple[Axis, ...]:
    return tuple(axis for _, axis in tensor.axes)
