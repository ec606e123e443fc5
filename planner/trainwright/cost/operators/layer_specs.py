"""Specs of a layer's operators, from the choices of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainwright.cost.operators.algorithm_costs import Rewriting
from trainwright.cost.operators.parallel_algorithms import GraphAlgorithms
from trainwright.loop_nests.operations import Operation, spec_of
from trainwright.operator_shardings import OperatorSpecs, WeightHeld, format_algorithm

LayerAssignment = Sequence[tuple[int, int]]
"""(weight mode, algorithm) of each node of a layer's graph."""


def layer_operators(
    algorithms: GraphAlgorithms, rewriting: Rewriting, assignment: LayerAssignment
) -> tuple[OperatorSpecs, ...]:
    """Return the specs of a layer's operators; `rewriting` are the all-reduces that end as a reduce-scatter."""
    graph, specs = algorithms.graph, []
    for index, operation in enumerate(graph.operations):
        weight_mode, algorithm = assignment[graph.node_of[index]]
        specs.append(_operator_specs(algorithms, rewriting, index, operation, weight_mode, algorithm))
    return tuple(specs)


def _operator_specs(  # noqa: PLR0913, PLR0917 - an operator, its choice and what surrounds both
    graph: GraphAlgorithms, rewriting: Rewriting, index: int, operation: Operation, weight_mode: int, algorithm: int
) -> OperatorSpecs:
    algorithms = graph.operators[index]
    mapping = algorithms.mappings[algorithm]
    plain = OperatorSpecs(
        operation.name,
        format_algorithm(mapping),
        spec_of(operation.output, mapping),
        tuple(spec_of(operand, mapping) for operand in operation.operands),
        sum_scattered=rewriting.activations and bool(algorithms.output_sums[algorithm]),
    )
    if operation.weight is None or algorithms.weight_sums is None:
        return plain
    replicated = bool(algorithms.weight_sums[algorithm])
    return replace(
        plain,
        weight=spec_of(operation.weight, mapping),
        weight_held=WeightHeld.GATHERED if weight_mode and replicated else WeightHeld.WHOLE,
        update_sharded=replicated and (rewriting.gradients or weight_mode == 1),
    )
