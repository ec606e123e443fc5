"""Initial weights: any part equals that part of the whole, and a rank makes no more than it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.cluster import Device
from trainwright.families import T5, Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright_worker import initial_weights
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.flat_parameter import FlatParameter, ShardGroup, Weight
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.initial_weights import NormalWeight, WeightSource, deferred_weights, normal
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.live_bytes import AllocationTracker

CPU = torch.device("cpu")
RANKS = 8


def values_of(weight: NormalWeight) -> torch.Tensor:
    values = torch.empty(weight.shape)
    weight.draw_into(values.view(-1), 0)
    return values


@st.composite
def parts(draw: st.DrawFn) -> tuple[NormalWeight, int]:
    """Draw a part of a weight, and where an interval of it begins."""
    dimensions, degree = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 4)))
    split = draw(st.none() | st.integers(0, dimensions - 1))
    shape = [draw(st.integers(1, 9)) for _ in range(dimensions)]
    if split is not None:
        shape[split] = shape[split] * degree + draw(st.integers(0, degree - 1))  # parts may be unequal
    whole = normal(WeightSource(draw(st.integers(0, 9)), "layer 3"), *shape)
    part = whole.part(split, draw(st.integers(0, degree - 1)), degree)
    return part, draw(st.integers(0, torch.Size(part.shape).numel() - 1))


@examples(200)
@given(parts(), st.data())
def test_a_part_has_the_values_of_the_whole_weight(found: tuple[NormalWeight, int], data: st.DataObject) -> None:
    part, start = found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_weights, "TILE_COLUMNS", 3)
        patch.setattr(initial_weights, "TILE_VALUES", 12)
        whole = values_of(part.part(part.split_dimension, 0, 1))
        interval = torch.empty(data.draw(st.integers(1, torch.Size(part.shape).numel() - start)))
        part.draw_into(interval, start)
    shard = TensorShard(part.index, part.degree)
    own = whole if part.split_dimension is None else shard.slice_weight(whole, part.split_dimension)
    assert torch.equal(interval, own.flatten()[start : start + len(interval)])


@examples(200)
@given(parts(), st.data())
def test_a_box_has_the_values_of_the_whole_weight(found: tuple[NormalWeight, int], data: st.DataObject) -> None:
    whole = found[0].part(found[0].split_dimension, 0, 1)
    cuts = {}
    for dimension, size in enumerate(whole.full_shape):
        count = data.draw(st.integers(1, min(size, 3)))
        cuts[dimension] = data.draw(st.integers(0, count - 1)), count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_weights, "TILE_COLUMNS", 3)
        patch.setattr(initial_weights, "TILE_VALUES", 12)
        own, box = values_of(whole), whole.box(cuts)
        for dimension, (index, count) in cuts.items():
            own = TensorShard(index, count).slice_weight(own, dimension)
        start = data.draw(st.integers(0, own.numel() - 1))
        interval = torch.empty(data.draw(st.integers(1, own.numel() - start)))
        box.draw_into(interval, start)
    assert box.shape == own.shape
    assert torch.equal(interval, own.flatten()[start : start + len(interval)])


def test_weights_are_normal_and_independent() -> None:
    source = WeightSource(0, "layer 0")
    first, second = (values_of(normal(source, 700, 900, scale=0.5)) for _ in range(2))
    other = values_of(normal(WeightSource(0, "layer 1"), 700, 900, scale=0.5))
    assert first.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(first.mean().item()) < 0.005
    for one in (second, other, first.roll(512, 0), first.roll(512, 1)):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), one.flatten()]))[0, 1].item()) < 0.01


def test_several_scales_are_those_of_equal_parts() -> None:
    queries, keys, values = values_of(normal(WeightSource(0, "layer 0"), 3, 64, 64, scale=(0.1, 1.0, 2.0)))
    assert [part.std().item() for part in (queries, keys, values)] == pytest.approx([0.1, 1.0, 2.0], rel=0.05)


def test_a_deferred_layer_has_shapes_but_no_memory() -> None:
    family = make_family_layers(
        Model.of(Llama(layers=1, hidden_size=64, heads=4, sequence_length=8, vocabulary_size=32))
    )
    with deferred_weights(CPU) as initial:
        layer = family.make(1, seed=1, shard=TensorShard(1, 2), shared={})
    made = family.make(1, seed=1, shard=TensorShard(1, 2), shared={})
    for (name, parameter), expected in zip(layer.named_parameters(), made.parameters(), strict=True):
        assert parameter.shape == expected.shape
        if parameter in initial:
            assert parameter.untyped_storage().nbytes() == 4, name
            assert torch.equal(values_of(initial[parameter]), expected)
        else:
            assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("sharding", Sharding)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_have_the_values_of_the_unsharded_weights(sharding: Sharding, dtype: torch.dtype) -> None:
    own = nn.Parameter(torch.arange(5.0))

    def flat(shard_group: ShardGroup) -> FlatParameter:
        drawn = normal(WeightSource(0, "layer 0"), 7, 9)
        weights = [Weight("drawn", nn.Parameter(torch.empty(()).expand(7, 9)), initial=drawn)]
        return FlatParameter(
            [*weights, Weight("own", nn.Parameter(own.detach()))], shard_group, dtype=dtype, device=CPU
        )

    whole = flat(ShardGroup())
    for index in range(3):
        part = flat(ShardGroup(sharding, None, index, 3))
        expected = torch.zeros(3 * part.shard_size)
        expected[: whole.size] = whole.master_shard[: whole.size]
        shard = expected[part.shard_start : part.shard_stop]
        assert torch.equal(part.master_shard, shard)
        assert torch.equal(part.shard, shard.to(dtype))
        if not part.is_sharded:
            assert torch.equal(part.full_values, expected.to(dtype))


def test_half_precision_weights_begin_at_multiples_of_sixteen_bytes() -> None:
    weights = [Weight(str(size), nn.Parameter(torch.ones(size))) for size in (3, 8, 1, 17)]
    unit = FlatParameter(weights, ShardGroup(Sharding.ZERO1, None, 1, 3), dtype=torch.float16, device=CPU)
    assert {weight.parameter.data_ptr() % 16 for weight in unit.weights} == {0}
    assert unit.shard.data_ptr() % 16 == 0


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    """Yield the groups of a rank among eight whose collectives do nothing."""
    dist.init_process_group("fake", rank=3, world_size=RANKS, store=FakeStore())
    yield ProcessGroups(timedelta(seconds=5))
    dist.destroy_process_group()


MODELS = {
    "gpt": Model.of(Gpt(layers=6, hidden_size=256, heads=4, sequence_length=8, vocabulary_size=64), Dtype.BFLOAT16),
    "t5": Model.of(T5(layers=3, hidden_size=256, heads=4, sequence_length=8, vocabulary_size=64), Dtype.FLOAT32),
}


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3])
@pytest.mark.parametrize("name", MODELS)
def test_construction_needs_no_more_memory_than_an_iteration(
    groups: ProcessGroups, name: str, sharding: Sharding
) -> None:
    model = MODELS[name]
    layers = len(model.layers)
    devices = tuple(Device("node", slot) for slot in range(RANKS))
    run = LayerRun(0, layers, Strategy(1, RANKS, sharding=sharding), (1,) * RANKS)
    plan = Plan(layers, RANKS, (Pipeline(1, RANKS, (Stage(devices, (run,)),)),))
    beats: list[str] = []
    with AllocationTracker([]) as construction:
        executor = PlanExecutor(plan, model, TrainingConfig(), RankContext(3, CPU, beat=beats.append), groups)
    assert {f"making layer {layer}" for layer in range(layers)} <= set(beats)
    assert any(beat.startswith("drawing 1.") for beat in beats)
    batch = executor.make_batch(0)
    with AllocationTracker([*executor.optimizer.resident_tensors, *batch.tensors]) as iteration:
        executor.run_iteration(batch)
    assert construction.peak_bytes <= iteration.peak_bytes


def test_all_gpus_draw_the_same_values() -> None:
    """CUDA caps the grid of a draw at the blocks that a GPU runs at once, in threads of one value each up to there."""
    threads_per_block, blocks_of_a_t4 = 256, 40 * 1024 // 256
    assert blocks_of_a_t4 * threads_per_block >= initial_weights.TILE_VALUES
