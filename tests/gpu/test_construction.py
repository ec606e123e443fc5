"""Construction on a GPU: a rank draws its weights there, soon and within the memory of an iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.cluster import Device
from trainwright.families import Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding, Stage
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.measure.live_bytes import measure_peak_bytes

RANKS = 8
GPU = torch.device("cuda", 0)
MODEL = Model.of(
    Llama(layers=16, hidden_size=2048, heads=16, sequence_length=128, vocabulary_size=32000), Dtype.BFLOAT16
)
"""A model of 0.9 billion values."""


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    """Yield the groups of a rank among eight whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield ProcessGroups(timedelta(seconds=5))
    dist.destroy_process_group()


def executor_of(sharding: Sharding, data: int, groups: ProcessGroups) -> PlanExecutor:
    layers = len(MODEL.layers)
    devices = tuple(Device("node", slot) for slot in range(data))
    run = LayerRun(0, layers, 1, data, (1,) * data, sharding=sharding)
    plan = Plan(layers, data, (Pipeline(1, data, (Stage(devices, (run,)),)),))
    return PlanExecutor(plan, MODEL, TrainingConfig(), RankContext(0, GPU), groups)


def test_a_billion_weights_are_drawn_within_five_seconds(groups: ProcessGroups) -> None:
    values = sum(MODEL.kind_of(layer).parameters for layer in range(len(MODEL.layers)))
    torch.zeros(1, device=GPU)
    begin = time.perf_counter()
    executor = executor_of(Sharding.NONE, 1, groups)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    assert values > 0.85e9
    assert executor.stage.updated_parameters >= values
    assert seconds * 0.9e9 / values < 5


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3])
def test_construction_needs_no_more_memory_than_an_iteration(groups: ProcessGroups, sharding: Sharding) -> None:
    made: list[PlanExecutor] = []
    construction = measure_peak_bytes(lambda: made.append(executor_of(sharding, RANKS, groups)), [], GPU)
    executor = made[0]
    batch = executor.make_batch(0)
    resident = [*executor.optimizer.resident_tensors, *batch.tensors]
    iteration = measure_peak_bytes(lambda: executor.run_iteration(batch), resident, GPU)
    assert construction <= iteration
