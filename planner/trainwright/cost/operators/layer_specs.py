"""Specs of a layer's operators, from the choices of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainwright.cost.operators.algorithm_costs import Rewriting
from trainwright.cost.operators.operator_catalogue import IndexedTensor, Operation
from trainwright.cost.operators.parallel_algorithms import GraphAlgorithms
from trainwright.cost.operators.sharding_specs import Axis, format_spec
from trainwright.operator_shardings import LayerSpecs, OperatorSpecs, WeightHeld, format_algorithm

LayerAssignment = Sequence[tuple[int, int]]
"""(weight mode, algorithm) of each node of a layer's graph."""


def layer_specs(
    algorithms: GraphAlgorithms, rewriting: Rewriting, layer: int, kind: str, assignment: LayerAssignment
) -> LayerSpecs:
    """Return the specs of a layer's operators; `rewriting` are the all-reduces that end as a reduce-scatter."""
    graph, specs = algorithms.graph, []
    for index, operation in enumerate(graph.operations):
        weight_mode, algorithm = assignment[graph.node_of[index]]
        specs.append(_operator_specs(algorithms, rewriting, index, operation, weight_mode, algorithm))
    return LayerSpecs(layer, kind, tuple(specs))


def _operator_specs(  # noqa: PLR0913, PLR0917 - an operator, its choice and what surrounds both
    graph: GraphAlgorithms, rewriting: Rewriting, index: int, operation: Operation, weight_mode: int, algorithm: int
) -> OperatorSpecs:
    algorithms = graph.operators[index]
    operands = tuple(
        format_spec(int(layouts[algorithm]), _axes(operand))
        for operand, layouts in zip(operation.operands, algorithms.operand_layouts, strict=True)
    )
    output = format_spec(int(algorithms.output_layouts[algorithm]), _axes(operation.output))
    scattered = rewriting.activations and bool(algorithms.output_sums[algorithm])
    plain = OperatorSpecs(
        operation.name, format_algorithm(algorithms.mappings[algorithm]), output, operands, sum_scattered=scattered
    )
    if operation.weight is None or algorithms.weight_layouts is None or algorithms.weight_sums is None:
        return plain
    replicated = bool(algorithms.weight_sums[algorithm])
    return replace(
        plain,
        weight=format_spec(int(algorithms.weight_layouts[algorithm]), _axes(operation.weight)),
        weight_held=WeightHeld.GATHERED if weight_mode and replicated else WeightHeld.WHOLE,
        update_sharded=replicated and (rewriting.gradients or weight_mode == 1),
    )


def _axes(tensor: IndexedTensor) -> tuple[Axis, ...]:
    return tuple(axis for _, axis in tensor.axes)
