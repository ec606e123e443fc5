"""Random numbers of layers: a recomputed forward draws the same again, and replicas draw different ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright_worker.executor.executor import PlanExecutor
from trainwright_worker.layers.custom import CustomModel
from trainwright_worker.model_description.description import describe

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
    return Model.of(describe("dropping_module:model", check_seconds=0))


def test_recomputed_dropout_has_the_gradients_of_stored_dropout(
    dropping: Model, executor: Callable[..., PlanExecutor]
) -> None:
    losses, weights = [], []
    for recompute in (False, True):
        made = executor(dropping, recompute=recompute)
        losses.append([made.run_iteration(made.make_batch(iteration)) for iteration in range(2)])
        weights.append(torch.cat([one.master_shard for one in made.stage.flat_parameters]))
    assert losses[0] == losses[1]
    assert torch.equal(*weights)


def test_dropout_differs_between_replicas(dropping: Model, executor: Callable[..., PlanExecutor]) -> None:
    losses = set()
    for rank in range(RANKS):
        replica = executor(dropping, rank, data=RANKS)
        losses.add(replica.run_iteration(replica.make_batch(0)))
    assert len(losses) == RANKS


def test_ranks_of_a_tensor_group_draw_the_same_numbers(executor: Callable[..., PlanExecutor]) -> None:
    model = Model.of(Gpt(1, 16, 2, 4, 8))
    seeds = [
        [rows.seed for run in executor(model, rank, tensor=RANKS).make_batch(0).rows for rows in run]
        for rank in range(RANKS)
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(seeds[0])
