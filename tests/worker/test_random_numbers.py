"""Random numbers of layers: a recomputed forward draws the same again, and replicas draw different ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.cluster import Device
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.layers.custom import CustomModel
from trainwright_worker.layers.custom_description import describe

WIDTH = 16
RANKS = 2


def equal_rows(seed: int, iteration: int, first: int, count: int) -> dict[str, torch.Tensor]:
    return {"inputs": torch.ones(count, WIDTH), "targets": torch.zeros(count, WIDTH)}


class Distance(nn.Module):
    def forward(self, made: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (made - targets).square().mean(1)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> Model:
    module = ModuleType("dropping_module")
    module.model = partial(CustomModel, [block, block, Distance], equal_rows)
    monkeypatch.setitem(sys.modules, "dropping_module", module)
    return Model.of(describe("dropping_module:model"))


@pytest.fixture
def executor() -> Iterator[Callable[..., PlanExecutor]]:
    """Return a factory of executors of any rank, whose collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    groups = ProcessGroups(timedelta(seconds=10))

    def of(model: Model, rank: int = 0, *, data: int = 1, tensor: int = 1, recompute: bool = False) -> PlanExecutor:
        torch.manual_seed(0)  # every process starts with the same generator
        layers, devices = len(model.layers), tuple(Device("node", slot) for slot in range(data * tensor))
        run = LayerRun(0, layers, tensor, data, (4 // data,) * data, recompute=recompute)
        plan = Plan(layers, 8, (Pipeline(2, 4, (Stage(devices, (run,)),)),))
        return PlanExecutor(plan, model, TrainingConfig("sgd", 0.1), RankContext(rank, torch.device("cpu")), groups)

    yield of
    dist.destroy_process_group()


def test_recomputed_dropout_has_the_gradients_of_stored_dropout(dropping: Model, executor) -> None:
    losses, weights = [], []
    for recompute in (False, True):
        made = executor(dropping, recompute=recompute)
        losses.append([made.run_iteration(made.make_batch(iteration)) for iteration in range(2)])
        weights.append(torch.cat([one.master_shard for one in made.stage.flat_parameters]))
    assert losses[0] == losses[1]
    assert torch.equal(*weights)


def test_dropout_differs_between_replicas(dropping: Model, executor) -> None:
    losses = set()
    for rank in range(RANKS):
        replica = executor(dropping, rank, data=RANKS)
        losses.add(replica.run_iteration(replica.make_batch(0)))
    assert len(losses) == RANKS


def test_ranks_of_a_tensor_group_draw_the_same_numbers(executor) -> None:
    model = Model.of(Gpt(1, 16, 2, 4, 8))
    seeds = [
        [rows.seed for run in executor(model, rank, tensor=RANKS).make_batch(0).rows for rows in run]
        for rank in range(RANKS)
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(seeds[0])
