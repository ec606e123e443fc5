"""Plans with shardings of operators: those that Alpa's integer program chooses, and those of given loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cluster import Device
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.loop_nests.operations import Operation, spec_of
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, Loop, LoopMapping, OperatorSpecs, SpanSpecs, format_algorithm
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search import Problem
from trainwright.search.alpa.intra import IntraOperator, LogicalMesh
from trainwright.strategy import RankOrder, Strategy

ACCELERATOR = "Tesla-V100-SXM2-16GB"
FAST, SLOW = (0.0, 1e-13), (1e-5, 3e-10)
"""Latency and seconds per byte of links that cost almost nothing, and of links between machines."""

Links = tuple[tuple[float, float], tuple[float, float]]
LETTERS: dict[str, Loop | None] = {
    ".": None, "b": Loop.BATCH, "s": Loop.SEQUENCE, "h": Loop.HEADS, "i": Loop.IN, "o": Loop.OUT, "w": Loop.WIDTH,
    "e": Loop.ENTRIES, "x": Loop.EXPERT,
}  # fmt: skip

MEGATRON = {
    "tokens": "be", "positions": "b.", "attention_normalisation": "b.", "query_key_value": "bo", "attention": "bh",
    "attention_output": "bi", "attention_residual": "b.", "feed_forward_normalisation": "b.", "feed_forward_in": "bo",
    "activation": "bw", "feed_forward_out": "bi", "feed_forward_residual": "b.", "final_normalisation": "b.",
    "projection": "bo", "cross_entropy": "bw",
}  # fmt: skip
FILTERS = {**MEGATRON, "patches": "io", "class_token": "ww", "positions": ".w"}
BATCH = dict.fromkeys(MEGATRON, "bb")
MIXED = {
    "tokens": "ew", "positions": ".w", "attention_normalisation": "bs", "query_key_value": "io", "attention": "hh",
    "attention_output": "io", "attention_residual": "bs", "feed_forward_normalisation": "bs", "feed_forward_in": "os",
    "activation": "ws", "feed_forward_out": "is", "feed_forward_residual": "bs", "final_normalisation": "ws",
    "projection": "oi", "cross_entropy": "w.",
}  # fmt: skip
TRANSPOSED = {
    "tokens": "ws", "positions": "ws", "attention_normalisation": "sb", "query_key_value": "ob", "attention": "hb",
    "attention_output": "ib", "attention_residual": "sb", "feed_forward_normalisation": "sb", "feed_forward_in": "si",
    "activation": "sw", "feed_forward_out": "oi", "feed_forward_residual": "sb", "final_normalisation": "sb",
    "projection": "sb", "cross_entropy": "sb",
}  # fmt: skip
QUERIES = {
    "tokens": "bs", "positions": "bs", "attention_normalisation": "ww", "query_key_value": "ii", "attention": "ss",
    "attention_output": "io", "attention_residual": ".w", "feed_forward_normalisation": ".w", "feed_forward_in": "io",
    "activation": ".w", "feed_forward_out": "oo", "feed_forward_residual": "ww", "final_normalisation": "ww",
    "projection": "oo", "cross_entropy": "ww",
}  # fmt: skip
"""Loops on mesh dimension 0 and 1 by operator of a GPT-2, or of a ViT: `bo` is batch and out."""
T5_MIXED = {
    "tokens": "be", "attention_normalisation": "bs", "query_key_value": "io", "attention": "sh", "attention_output": "ib",
    "position_biases": "sw", "attention_residual": "sb", "feed_forward_normalisation": "sb", "feed_forward_in": "oi",
    "activation": "ws", "feed_forward_out": "is", "feed_forward_residual": "bs", "encoder_normalisation": "sw",
    "decoder_tokens": "ew", "cross_attention_normalisation": "bw", "cross_query": "oi", "cross_key_value": "is",
    "cross_attention": "hs", "cross_attention_output": "bi", "cross_attention_residual": "ws", "final_normalisation": "bs",
    "scale": "bs", "projection": "bo", "cross_entropy": "sw",
}  # fmt: skip
"""Loops on mesh dimension 0 and 1 by operator of a T5."""
EXPERTS = {
    "tokens": "bs", "attention_normalisation": "bs", "query_key_value": "bo", "rotary": "bw", "attention": "bh",
    "attention_output": "bi", "attention_residual": "b.", "feed_forward_normalisation": "bs", "router": "io",
    "choice": "bs", "dispatch": "bx", "experts_gate_and_up": "xo", "experts_gate": "xw", "experts_down": "xi",
    "combination": "sx", "feed_forward_residual": "b.", "final_normalisation": "b.", "projection": "bo",
    "cross_entropy": "bw",
}  # fmt: skip
"""Loops by operator of a gated mixture, whose experts' weights are split in two dimensions."""


def devices(count: int, first: int = 0) -> tuple[Device, ...]:
    return tuple(Device(f"node-{place // 2}", place % 2) for place in range(first, first + count))


def plan_of(stages: Sequence[Stage], rows: int, micro_batches: int = 2) -> Plan:
    return Plan(stages[-1].end, rows * micro_batches, (Pipeline(micro_batches, rows, tuple(stages)),))


def plan_of_pipelines(*pipelines: Sequence[Stage]) -> Plan:
    """Return a plan of pipelines that each take two micro-batches, whose devices follow one another."""
    joined, first = [], 0
    for stages in pipelines:
        moved = []
        for stage in stages:
            moved.append(replace(stage, devices=devices(len(stage.devices), first)))
            first += len(stage.devices)
        joined.append(Pipeline(2, sum(stages[0].layers[0].rows), tuple(moved)))
    return Plan(joined[0].stages[-1].end, sum(2 * each.micro_batch_size for each in joined), tuple(joined))


@lru_cache(maxsize=8)
def _intra_operator(model: Model, batch: int, *, divides_sequences: bool) -> IntraOperator:
    profiles = estimate_profiles(model, [ACCELERATOR], tensor_degrees=[1], rows=[1, 2, 4, 8])
    problem = Problem(cluster_of({"p3.16xlarge": 2}), model, profiles, batch)
    return IntraOperator(problem, divides_sequences=divides_sequences)


def chosen(
    model: Model, shape: tuple[int, int], rows: int, links: Links, *, divides_sequences: bool = False
) -> list[Stage]:
    """Return one stage of all layers for each different choice of the integer program, by ascending memory price."""
    intra = _intra_operator(model, 4 * rows, divides_sequences=divides_sequences)
    mesh = LogicalMesh((ACCELERATOR,), shape, *zip(*links, strict=True))
    stages = []
    for costs in intra.options(mesh, rows):
        sharding = costs.sharding(0, len(model.layers))
        runs = tuple(run.layer_run(rows) for run in sharding.degrees)
        stages.append(Stage(devices(shape[0] * shape[1]), runs, sharding.specs))
    return list(dict.fromkeys(stages))


def given(
    model: Model, shape: tuple[int, int], rows: int, loops: Mapping[str, str], span: tuple[int, int], **fields: object
) -> Stage:
    """Return a stage whose operators shard the loops that letters name. `fields`: of operators with a weight."""
    layers = []
    for layer in range(*span):
        operators = []
        for operation in wire_layer(model, model.kind_of(layer)).operations:
            of_weight = fields if operation.weight is not None else {}
            operators.append(replace(specs_of(operation, _mapping(loops[operation.name], shape)), **of_weight))
        layers.append(LayerSpecs(layer, model.layers[layer], tuple(operators)))
    strategy = Strategy(shape[1], shape[0], RankOrder.TENSOR_INNER)
    run = LayerRun(span[0], span[1] - span[0], strategy, (rows // shape[0],) * shape[0])
    return Stage(devices(shape[0] * shape[1]), (run,), SpanSpecs(shape, tuple(layers)))


def specs_of(operation: Operation, mapping: LoopMapping) -> OperatorSpecs:
    """Return the specs of an operator whose loops a mesh shards so."""
    weight = None if operation.weight is None else spec_of(operation.weight, mapping)
    operands = tuple(spec_of(operand, mapping) for operand in operation.operands)
    return OperatorSpecs(
        operation.name, format_algorithm(mapping), spec_of(operation.output, mapping), operands, weight
    )


def _mapping(letters: str, shape: tuple[int, int]) -> LoopMapping:
    first, second = (LETTERS[letter] if size > 1 else None for letter, size in zip(letters, shape, strict=True))
    return first, second
