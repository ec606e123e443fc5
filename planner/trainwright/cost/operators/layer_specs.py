"""Specs of a layer's operators, from the choices of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainwright.cost.operators.algorithm_costs import Rewriting
from trainwright.cost.operators.parallel_algorithms import GraphAlgorithms, OperatorAlgorithms
from trainwright.loop_nests.operations import Operation, spec_of
from trainwright.operator_shardings import OperatorSpecs, WeightHeld, format_algorithm

LayerAssignment = Sequence[tuple[int, int]]
"""(weight mode, algorithm) of each node of a layer's graph."""


def layer_operators(
    algorithms: GraphAlgorithms, rewriting: Rewriting, assignment: LayerAssignment
) -> tuple[OperatorSpecs, ...]:
    """Return the specs of a layer's operators; `rewriting` are the all-reduces that end as a reduce-scatter."""
    graph = algorithms.graph
    chosen = [assignment[graph.node_of[index]] for index in range(len(graph.operations))]
    return tuple(
        _operator_specs(operation, own, rewriting, *choice)
        for operation, own, choice in zip(graph.operations, algorithms.operators, chosen, strict=True)
    )


def _operator_specs(
    operation: Operation, algorithms: OperatorAlgorithms, rewriting: Rewriting, weight_mode: int, algorithm: int
) -> OperatorSpecs:
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
    is_replicated = bool(algorithms.weight_sums[algorithm])
    return replace(
        plain,
        weight=spec_of(operation.weight, mapping),
        weight_held=WeightHeld.GATHERED if weight_mode and is_replicated else WeightHeld.WHOLE,
        update_sharded=is_replicated and (rewriting.gradients or weight_mode == 1),
    )
