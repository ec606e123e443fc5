"""The worker runs every parallel algorithm that the integer program may choose for an operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainwright.cost.operators.operator_graph import OperatorGraph
from trainwright.cost.operators.parallel_algorithms import AlgorithmSpace, GraphAlgorithms
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.loop_nests.operations import Operation, spec_of
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, LoopMapping, OperatorSpecs, SpanSpecs, format_algorithm
from trainwright.worker_api.operator_support import layer_problems

SHAPE, ROWS = (2, 4), 8


def specs_of(operation: Operation, mapping: LoopMapping) -> OperatorSpecs:
    weight = None if operation.weight is None else spec_of(operation.weight, mapping)
    operands = tuple(spec_of(operand, mapping) for operand in operation.operands)
    return OperatorSpecs(
        operation.name, format_algorithm(mapping), spec_of(operation.output, mapping), operands, weight
    )


def offered(model: Model, layer: int) -> Iterator[LayerSpecs]:
    """Yield a layer with one algorithm after the other of operators that choose together; others are replicated."""
    kind = model.kind_of(layer)
    graph = OperatorGraph.of(wire_layer(model, kind))
    algorithms = GraphAlgorithms.of(graph, AlgorithmSpace(SHAPE, ROWS), 8)
    for node, count in zip(graph.nodes, algorithms.counts, strict=True):
        for number in range(count):
            mappings = {index: algorithms.operators[index].mappings[number] for index in node.operations}
            operators = (
                specs_of(each, mappings.get(index, (None, None))) for index, each in enumerate(graph.operations)
            )
            yield LayerSpecs(layer, kind.name, tuple(operators))


@pytest.mark.parametrize(
    "family",
    [
        Gpt(1, 96, 12, 16, 100),
        Gpt(1, 64, 8, 16, 100, rotary_size=4, key_value_heads=1),
        Llama(1, 64, 8, 16, 100, intermediate_size=100, key_value_heads=2),
        Llama(1, 64, 8, 16, 100, key_value_heads=4, query_key_norm=True),
        Llama(1, 64, 8, 16, 100, key_value_heads=4, query_key_norm=True, query_key_norm_over="width"),
        Bert(1, 96, 12, 16, 100),
        Vit(1, 96, 12, 42, 14),
        T5(1, 64, 8, 16, 100, gated=True),
        Moe(2, 64, 8, 16, 100, experts=8, expert_every=2, key_value_heads=2),
        WideResnet(50, 2),
        Swin((2, 2), 32, image_size=56, patch_size=4),
        TransGan((1, 1, 1), bottom_width=8),
    ],
    ids=lambda family: str(family.family),
)
def test_every_algorithm_that_may_be_chosen_runs(family: Family) -> None:
    model = Model.of(family)
    for layer in map(model.layers.index, dict.fromkeys(model.layers)):
        for specs in offered(model, layer):
            assert next(layer_problems(specs, SpanSpecs(SHAPE, (specs,)), model), None) is None
