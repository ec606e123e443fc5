"""Recompute of layers that draw random numbers: the device's generator gives the recomputed forward the same ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu_checks.findings import Finding, judged
from gpu_checks.hardware import Hardware
from gpu_checks.running import Subject
from trainwright.cluster import Device
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.layers.custom import CustomModel
from trainwright_worker.model_description.description import describe

WIDTH, ROWS, MICRO_BATCHES, ITERATIONS = 64, 4, 2, 3
MODULE = "gpu_checks_dropping_model"


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield a custom model with dropout."""
    yield Subject("dropout", partial(find, hardware))


def find(hardware: Hardware) -> Iterator[Finding]:
    """Train with stored and with recomputed activations from equal seeds, and compare losses and weights."""
    module = ModuleType(MODULE)
    module.model = partial(CustomModel, [_block, _block, _Distance], _equal_rows)  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    model = Model.of(describe(f"{MODULE}:model", check_seconds=0))  # another process has no such module
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        (losses, weights), (again, recomputed) = (_train(hardware, model, recompute=which) for which in (False, True))
    finally:
        dist.destroy_process_group()
    holds = losses == again and torch.equal(weights, recomputed) and len(set(losses)) == ITERATIONS
    measured = f"losses {', '.join(f'{loss:.6f}' for loss in again)}"
    expected = f"{', '.join(f'{loss:.6f}' for loss in losses)} without recompute, and equal weights"
    yield judged("dropout under recompute", measured, expected, holds=holds)


def _train(hardware: Hardware, model: Model, *, recompute: bool) -> tuple[list[float], Tensor]:
    """Return the losses of some iterations, and the weights after them."""
    torch.manual_seed(0)
    run = LayerRun(0, len(model.layers), Strategy(1, 1, recompute=recompute), (ROWS,))
    plan = Plan(
        len(model.layers),
        ROWS * MICRO_BATCHES,
        (Pipeline(MICRO_BATCHES, ROWS, (Stage((Device("node", 0),), (run,)),)),),
    )
    context, groups = RankContext(0, hardware.device), ProcessGroups(timedelta(minutes=1))
    executor = PlanExecutor(plan, model, TrainingConfig("sgd", 0.1), context, groups)
    losses = [executor.run_iteration(executor.make_batch(iteration)) for iteration in range(ITERATIONS)]
    return losses, torch.cat([one.master_shard for one in executor.stage.flat_parameters])


def _equal_rows(*, count: int, **_place: int) -> dict[str, Tensor]:
    return {"inputs": torch.ones(count, WIDTH), "targets": torch.zeros(count, WIDTH)}


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


class _Distance(nn.Module):
    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return (made - targets).square().mean(1)
