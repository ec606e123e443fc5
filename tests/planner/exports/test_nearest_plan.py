"""The nearest plan that a trainer supports, on random plans of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exported_shapes import plans, shapes
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Device
from trainwright.exports import (
    TARGETS,
    Capabilities,
    UniformShape,
    is_expressible,
    losses,
    nearest_plan,
    nearest_shapes,
    shape_of,
)
from trainwright.exports.shape_moves import neighbours
from trainwright.exports.uniform_shape import ranks
from trainwright.families import T5, Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.strategy import RankOrder, Sharding, Strategy
from trainwright.training import Optimizer

FEW = Capabilities(
    pipelined_tensor=False,
    uneven_stages=False,
    replicated_tensor=False,
    shardings=frozenset({Sharding.NONE, Sharding.ZERO2}),
)
EVERY_CAPABILITIES = {**{name: target.capabilities for name, target in TARGETS.items()}, "few": FEW}


@given(plan=plans, name=st.sampled_from(sorted(EVERY_CAPABILITIES)))
@examples(400)
def test_nearest_plan_is_expressible_and_trains_the_same_batch(plan: Plan, name: str) -> None:
    capabilities = EVERY_CAPABILITIES[name]
    found = nearest_plan(plan, capabilities)
    assert is_expressible(found, capabilities), losses(found, capabilities)
    assert (found.global_batch_size, found.model_layers) == (plan.global_batch_size, plan.model_layers)
    assert set(found.devices) <= set(plan.devices)


@given(plan=plans, name=st.sampled_from(sorted(EVERY_CAPABILITIES)))
@examples(400)
def test_nearest_plan_is_the_plan_itself_exactly_if_it_is_expressible(plan: Plan, name: str) -> None:
    capabilities = EVERY_CAPABILITIES[name]
    assert (nearest_plan(plan, capabilities) == plan) == is_expressible(plan, capabilities)


@given(shape=shapes())
@examples(200)
def test_shape_of_the_plan_of_a_shape_is_the_shape(shape: UniformShape) -> None:
    assert shape_of(shape.plan()) == shape


@given(plan=plans, name=st.sampled_from(sorted(EVERY_CAPABILITIES)))
@examples(100)
def test_moves_stay_expressible_and_keep_the_batch(plan: Plan, name: str) -> None:
    capabilities = EVERY_CAPABILITIES[name]
    for shape in nearest_shapes(plan, capabilities)[:2]:
        for other in neighbours(shape, capabilities):
            assert other != shape
            assert is_expressible(other.plan(), capabilities)
            assert other.global_batch_size == plan.global_batch_size


@given(plan=plans)
@examples(100)
def test_a_launcher_loses_nothing(plan: Plan) -> None:
    assert nearest_plan(plan, TARGETS["torchrun"].capabilities) is plan


DEVICES = tuple(Device(f"node-{number // 2}", number % 2) for number in range(4))


def stage(
    first: int, count: int, devices: tuple[Device, ...], rows: tuple[int, ...] | None = None, **strategy: object
) -> Stage:
    chosen = Strategy(**{"tensor": 1, "data": len(devices), **strategy})
    return Stage(devices, (LayerRun(first, count, chosen, rows or (4 // chosen.data,) * chosen.data),))


def two_stages(first: Stage, second: Stage) -> Plan:
    return Plan(6, 8, (Pipeline(2, 4, (first, second)),))


def tensor_stage(first: int, devices: tuple[Device, ...], *, sequence_parallel: bool = False) -> Stage:
    return stage(first, 3, devices, tensor=2, data=1, sequence_parallel=sequence_parallel)


EVEN = two_stages(stage(0, 3, DEVICES[:2]), stage(3, 3, DEVICES[2:]))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (two_stages(stage(0, 3, DEVICES[:1]), stage(3, 3, DEVICES[1:3])), "degrees by stage (dp1 tp1 | dp2 tp1)"),
        (two_stages(stage(0, 3, DEVICES[:2], rows=(3, 1)), stage(3, 3, DEVICES[2:])), "uneven rows (1–3"),
        (two_stages(stage(0, 3, DEVICES[:2], sharding=Sharding.ZERO1), stage(3, 3, DEVICES[2:])), "sharding by layer"),
        (
            two_stages(stage(0, 3, DEVICES[:2], recompute=True), stage(3, 3, DEVICES[2:])),
            "recompute of chosen layers (3 of 3 | 0 of 3)",
        ),
        (Plan(6, 8, tuple(Pipeline(1, 4, (stage(0, 6, half),)) for half in (DEVICES[:2], DEVICES[2:]))), "2 pipelines"),
        (replace(EVEN, schedule=Schedule.GPIPE), "the schedule gpipe"),
        (
            two_stages(tensor_stage(0, DEVICES[:2], sequence_parallel=True), tensor_stage(3, DEVICES[2:])),
            "sequence parallelism of some layers",
        ),
    ],
)
def test_losses_name_what_megatron_cannot_be_told(plan: Plan, words: str) -> None:
    (loss,) = losses(plan, TARGETS["megatron"].capabilities)
    assert words in loss


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("accelerate", EVEN, "2 pipeline stages"),
        ("deepspeed", two_stages(stage(0, 2, DEVICES[:2]), stage(2, 4, DEVICES[2:])), "stages of chosen sizes (2 4 layers)"),
        ("deepspeed", two_stages(tensor_stage(0, DEVICES[:2]), tensor_stage(3, DEVICES[2:])), "tensor degree 2"),
        ("deepspeed", two_stages(tensor_stage(0, DEVICES[:2], sequence_parallel=True), tensor_stage(3, DEVICES[2:], sequence_parallel=True)), "sequence parallelism"),
        ("torchtitan", EVEN.map_stages(lambda one: Stage(one.devices, (one.layers[0].with_strategy(sharding=Sharding.ZERO2),))), "zero2"),
        ("torchtitan", EVEN.map_stages(lambda one: Stage(one.devices, (one.layers[0].with_strategy(sharding=Sharding.ZERO3),))), "zero3"),
        ("torchtitan", Plan(6, 8, (Pipeline(2, 4, (stage(0, 6, DEVICES[:2], sharding=Sharding.ZERO1),)),)), "zero1"),
        ("torchtitan", Plan(6, 4, (Pipeline(1, 4, EVEN.stages),)), "fewer micro-batches (1) than stages (2)"),
        ("megatron", EVEN.map_stages(lambda one: Stage(one.devices, (one.layers[0].with_strategy(sharding=Sharding.ZERO3),))), "zero3"),
        ("accelerate", Plan(6, 8, (Pipeline(2, 4, (stage(0, 6, DEVICES, tensor=2, data=2, rows=(2, 2)),)),)), "replicas without sharding"),
    ],
)  # fmt: skip
def test_losses_name_what_a_trainer_lacks(name: str, plan: Plan, words: str) -> None:
    assert any(words in loss for loss in losses(plan, TARGETS[name].capabilities))


def test_stages_are_no_loss_but_where_the_trainer_cannot_tie_their_weights() -> None:
    capabilities = TARGETS["torchtitan"].capabilities
    tied, untied = (
        Llama(layers=4, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=128, tied_embeddings=has_tied)
        for has_tied in (True, False)
    )
    assert losses(EVEN, capabilities.of(Model.of(untied, Dtype.BFLOAT16), "adam")) == ()
    (loss,) = losses(EVEN, capabilities.of(Model.of(tied, Dtype.BFLOAT16), "adam"))
    assert loss == "2 pipeline stages: it has none of models whose layers share a weight, such as an embedding"
    assert losses(EVEN, TARGETS["megatron"].capabilities.of(Model.of(tied, Dtype.BFLOAT16), "adam")) == ()


@pytest.mark.parametrize("sharding", [Sharding.ZERO2, Sharding.ZERO3])
def test_stages_of_torchtitan_that_shard_more_become_zero1(sharding: Sharding) -> None:
    plan = EVEN.map_stages(lambda one: Stage(one.devices, (one.layers[0].with_strategy(sharding=sharding),)))
    assert nearest_plan(plan, TARGETS["torchtitan"].capabilities) == plan.map_stages(
        lambda one: Stage(one.devices, (one.layers[0].with_strategy(sharding=Sharding.ZERO1),))
    )


def test_megatron_has_no_stages_of_a_t5() -> None:
    model = Model.of(T5(layers=2, hidden_size=64, heads=4, sequence_length=32), Dtype.BFLOAT16)
    capabilities = TARGETS["megatron"].capabilities.of(model, "adam")
    assert losses(EVEN, capabilities) == ("2 pipeline stages: it has none of t5",)
    assert len(nearest_plan(EVEN, capabilities).stages) == 1
    float16 = replace(model, dtype=Dtype.FLOAT16)
    assert losses(EVEN, TARGETS["deepspeed"].capabilities.of(float16, "adam")) == ()


@pytest.mark.parametrize("dtype", Dtype)
def test_replicas_of_deepspeed_stages_in_bfloat16_share_the_state_of_the_optimizer(dtype: Dtype) -> None:
    model = Model.of(Llama(layers=4, hidden_size=64, heads=4, sequence_length=32), dtype)
    capabilities = TARGETS["deepspeed"].capabilities.of(model, "adam")
    sharded = EVEN.map_stages(lambda one: Stage(one.devices, (one.layers[0].with_strategy(sharding=Sharding.ZERO1),)))
    is_shared = dtype is Dtype.BFLOAT16
    found = ("replicas without sharding of several stages in this number format",) if is_shared else ()
    assert losses(EVEN, capabilities) == found
    assert nearest_plan(EVEN, capabilities) == (sharded if is_shared else EVEN)
    unreplicated = two_stages(stage(0, 3, DEVICES[:1]), stage(3, 3, DEVICES[1:2]))
    unstaged = Plan(6, 8, (Pipeline(2, 4, (stage(0, 6, DEVICES),)),))
    assert not losses(unreplicated, capabilities) + losses(unstaged, capabilities) + losses(sharded, capabilities)


@pytest.mark.parametrize(
    ("name", "optimizer", "loss"),
    [
        ("megatron", "adam", ()),
        ("megatron", "sgd", ("sharding zero1 with sgd",)),
        ("deepspeed", "sgd", ()),
    ],
)
def test_megatron_shards_no_state_of_sgd(name: str, optimizer: Optimizer, loss: tuple[str, ...]) -> None:
    model = Model.of(Gpt(layers=4, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=128), Dtype.BFLOAT16)
    plan = EVEN.map_stages(lambda one: Stage(one.devices, (one.layers[0].with_strategy(sharding=Sharding.ZERO1),)))
    capabilities = TARGETS[name].capabilities.of(model, optimizer)
    assert losses(plan, capabilities) == loss
    assert nearest_plan(plan, capabilities) == (EVEN if loss else plan)


def test_ranks_keep_the_tensor_groups_of_a_plan_with_the_data_degree_innermost() -> None:
    run = LayerRun(0, 6, Strategy(2, 2, RankOrder.DATA_INNER), (2, 2))
    plan = Plan(6, 8, (Pipeline(2, 4, (Stage(DEVICES, (run,)),)),))
    assert ranks(plan) == (DEVICES[0], DEVICES[2], DEVICES[1], DEVICES[3])
    assert is_expressible(plan, TARGETS["megatron"].capabilities)


def test_nearest_plan_gives_fast_devices_more_layers() -> None:
    plan = two_stages(stage(0, 4, DEVICES[:1]), stage(4, 2, DEVICES[1:3]))
    found = nearest_plan(plan, TARGETS["megatron"].capabilities)
    sizes = {device: stage.end - stage.first for stage in found.stages for device in stage.devices}
    assert max(sizes, key=sizes.__getitem__) == DEVICES[0]
