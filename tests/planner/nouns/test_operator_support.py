"""The worker runs shardings of operators whose names it knows, and refuses others in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainwright.cluster import Device
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, OperatorSpecs, SpanSpecs, WeightHeld
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api.operator_support import layer_problems, operators_refusal, runs_operators

BLOCK = (
    OperatorSpecs("attention_normalisation", "batch→0", "S0 R R R", ("S0 R R R",), "R R"),
    OperatorSpecs("query_key_value", "batch→0 out→1", "S0 R S1", ("S0 R R",), "R S1"),
    OperatorSpecs("rotary", "batch→0 width→1", "S0 R S1 R", ("S0 R S1 R",)),
    OperatorSpecs("attention", "batch→0 heads→1", "S0 R S1", ("S0 R S1", "S0 S1")),
    OperatorSpecs("attention_output", "batch→0 in→1", "S0 R R", ("S0 R S1",), "S1 R"),
    OperatorSpecs("attention_residual", "batch→0", "S0 R R R", ("S0 R R R", "S0 R R R")),
    OperatorSpecs("feed_forward_normalisation", "batch→0", "S0 R R R", ("S0 R R R",), "R R"),
    OperatorSpecs("gate_and_up", "batch→0 out→1", "S0 R S1", ("S0 R R",), "R S1"),
    OperatorSpecs("gate", "batch→0 width→1", "S0 R S1 R", ("S0 R S1 R",)),
    OperatorSpecs("down", "batch→0 in→1", "S0 R R", ("S0 R S1",), "S1 R"),
    OperatorSpecs("feed_forward_residual", "batch→0", "S0 R R R", ("S0 R R R", "S0 R R R")),
)
FAMILY = Llama(1, 32, 4, 8, 64, intermediate_size=64, key_value_heads=2)


def plan_of(operators: tuple[OperatorSpecs, ...] = BLOCK, **fields: Any) -> Plan:
    """Return a plan of a Llama with one block, whose stage has these operators."""
    devices = tuple(Device("node", slot) for slot in range(6))
    stages = (
        Stage(devices[:1], (LayerRun(0, 1, Strategy(1, 1), (2,)),)),
        Stage(
            devices[1:5],
            (LayerRun(1, 1, Strategy(2, 2, **fields), (1, 1)),),
            SpanSpecs((2, 2), (LayerSpecs(1, "block", operators),)),
        ),
        Stage(devices[5:], (LayerRun(2, 1, Strategy(1, 1), (2,)),)),
    )
    return Plan(3, 2, (Pipeline(1, 2, stages),))


def changed(name: str, **fields: Any) -> Plan:
    return plan_of(tuple(replace(one, **fields) if one.name == name else one for one in BLOCK))


@pytest.mark.parametrize(
    "family",
    [
        FAMILY,
        replace(FAMILY, tied_embeddings=True),
        Gpt(1, 64, 4, 32, 128),
        Gpt(1, 64, 4, 32, 128, activation="relu"),
        Gpt(
            1, 64, 4, 32, 128, rotary_size=16, parallel_residual=True, shared_norm=True, key_value_heads=2, biases=False
        ),
        replace(FAMILY, query_key_norm=True, attention_window=4, activation="gelu", residual_multiplier=0.5),
        replace(FAMILY, query_key_norm=True, query_key_norm_over="width", block_norms="after"),
        Bert(1, 64, 4, 32, 128, next_sentence=False),
        Vit(1, 64, 4, 32, 8, classes=20),
        T5(1, 64, 4, 32, 128),
        T5(1, 64, 4, 32, 128, gated=True, tied_embeddings=False, head_size=32, decoder_sequence_length=16),
        Swin((1, 1), 32, image_size=32, window_size=4),
        TransGan((1, 0, 1), 64, bottom_width=4, window_size=8),
        WideResnet(101, 4, "second", 32, channels=4),
        Moe(
            2, 64, 4, 32, experts=4, expert_every=2, query_key_norm=True, query_key_value_bias=True, attention_window=8
        ),
        Moe(2, 64, 4, 32, experts_per_token=1, gated=False, balance_loss_weight=0.1),
    ],
)
def test_models_whose_operators_are_sharded_one_by_one(family: Family) -> None:
    assert runs_operators(Model.of(family))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Bert(1, 64, 4, 32, 128, dropout=True), "does not shard embedding_dropout of embedding by itself"),
        (T5(1, 64, 4, 32, 128, dropout=True), "does not shard embedding_dropout of embedding by itself"),
        (TransGan((1,), 64, dropout=True), "of trans_gan with dropout False, got True"),
        (TransGan((1,), 64, fused_gelu=False), "of trans_gan with fused_gelu True, got False"),
        (Gpt(1, 64, 4, 32, 128, dropout=True), "does not shard embedding_dropout of embedding by itself"),
    ],
)
def test_other_models_are_refused_by_name(family: Family, message: str) -> None:
    model = Model.of(family)
    assert not runs_operators(model)
    refusal = operators_refusal(plan_of(), model)
    assert refusal is not None
    assert message in refusal
    without = plan_of().map_stages(lambda stage: replace(stage, operators=None))
    assert operators_refusal(without, model) is None


def test_shardings_that_follow_from_their_algorithms_run() -> None:
    assert operators_refusal(plan_of(), Model.of(FAMILY)) is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            plan_of(BLOCK[1:]),
            "layer 1: expected a block of operators attention_normalisation, query_key_value, rotary, ",
        ),
        (plan_of(sequence_parallel=True), "layers 1…1: tensor groups divide the sequence, but operators say how"),
        (
            changed("down", sum_scattered=True),
            "layer 1, operator down: sum_scattered: the worker all-reduces sums of outputs, got true; make it false",
        ),
        (
            changed("down", output="S0 S1 R"),
            "layer 1, operator down: output: expected S0 R R, as batch→0 in→1 shards it, got S0 S1 R",
        ),
        (changed("down", operands=()), "operator down: operands: expected 1, got 0"),
        (
            changed("gate", algorithm="batch→0 heads→1"),
            "operator gate: algorithm: expected loops of batch, sequence, width, got batch→0 heads→1",
        ),
        (
            changed("gate", weight_held=WeightHeld.GATHERED),
            "operator gate: weight_held, update_sharded: it has no weight",
        ),
        (
            changed("rotary", algorithm="width→01", output="R R S01 R", operands=("R R S01 R",)),
            "operator rotary: algorithm: width→01 divides width by 4, which does not divide 2, the heads of keys and values",
        ),
    ],
)
def test_shardings_that_do_not_run_are_refused_by_layer_and_operator(plan: Plan, words: str) -> None:
    refusal = operators_refusal(plan, Model.of(FAMILY))
    assert refusal is not None
    assert words in refusal


def test_positions_are_divided_evenly() -> None:
    plan = changed("attention_normalisation", algorithm="sequence→0", output="R S0 R R", operands=("R S0 R R",))
    refusal = operators_refusal(plan, Model.of(replace(FAMILY, sequence_length=7)))
    assert refusal is not None
    assert "sequence→0 divides sequence by 2, which does not divide 7, the positions" in refusal


def test_pipelines_have_equal_shardings_of_operators() -> None:
    pipeline = plan_of().pipelines[0]
    others = tuple(
        replace(stage, devices=tuple(replace(device, node="other") for device in stage.devices))
        for stage in pipeline.stages
    )
    plan = Plan(3, 4, (pipeline, replace(pipeline, stages=others)))
    assert operators_refusal(plan, Model.of(FAMILY)) is None
    degrees = tuple(replace(stage, operators=None) for stage in others)
    refusal = operators_refusal(Plan(3, 4, (pipeline, replace(pipeline, stages=degrees))), Model.of(FAMILY))
    assert (
        refusal
        == "operators: expected those of pipeline 0 in every pipeline, got others in pipeline 1; make them equal"
    )


def test_width_of_a_class_token_is_divided_evenly() -> None:
    head = (
        OperatorSpecs("final_normalisation", "replicated", "R R R R", ("R R R R",), "R R"),
        OperatorSpecs("class_token", "width→1", "R R S1 R", ("R R S1 R",)),
        OperatorSpecs("projection", "replicated", "R R R", ("R R R",), "R R"),
        OperatorSpecs("cross_entropy", "replicated", "R", ("R R R",)),
    )
    model, layers = Model.of(Vit(1, 36, 4, 12, 4, classes=20)), LayerSpecs(2, "head", head)
    problems = [list(layer_problems(layers, SpanSpecs((1, size), (layers,)), model)) for size in (4, 8)]
    assert problems == [
        [],
        ["layer 2, operator class_token: algorithm: width→1 divides width by 8, which does not divide 36, the width"],
    ]
