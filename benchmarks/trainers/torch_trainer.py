"""Trainer of torch's own parts: DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2.

The layers are the executor's classes with the executor's initial weights, so only the trainer differs. The optimizer is
torch's fused Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from trainers.plans import ROWS, UniformPlan
from trainwright.model import Model
from trainwright.plan import Sharding
from trainwright_worker.executor.executor import TrainingConfig
from trainwright_worker.layers.layer import Boundary, Data, SharedWeights
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard


class StackedModel(nn.Module):
    """Consecutive layers of a model, unsharded, as one module."""

    def __init__(self, model: Model, layers: Sequence[int], seed: int) -> None:
        super().__init__()
        family = make_family_layers(model)
        shared: SharedWeights = {}
        self.layers = nn.ModuleList(
            family.make(layer, seed=seed, shard=TensorShard(), shared=shared) for layer in layers
        )

    def forward(self, data: Data) -> Tensor:
        """Return the sum over rows of their losses, shape ()."""
        boundary: Boundary = ()
        loss: Tensor | None = None
        for layer in self.layers:
            boundary, loss = layer(boundary, data)
        assert loss is not None
        return loss


class DataParallelTrainer:
    """Trainer of a plan with one stage, on this rank of the world group."""

    def __init__(self, plan: UniformPlan, model: Model, training: TrainingConfig) -> None:
        self._plan, self._seed, self._rank = plan, training.seed, dist.get_rank()
        self._family = make_family_layers(model)
        stacked = StackedModel(model, range(len(model.layers)), training.seed)
        self._module: nn.Module
        self._loss_factor = 1 / ROWS
        if plan.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
            self._module = shard_fully(stacked, plan)
        else:
            self._module = DistributedDataParallel(stacked, gradient_as_bucket_view=True)
            self._loss_factor *= plan.data  # DistributedDataParallel averages the replicas' gradients
        self._optimizer = make_optimizer(self._module, plan.sharding, training.learning_rate)

    def make_batch(self, iteration: int) -> Data:
        """Return this rank's rows, the same as the executor's."""
        count = self._plan.replica_rows
        return self._family.rows(
            ("tokens", "targets"), seed=self._seed, iteration=iteration, first=self._rank * count, count=count
        )

    def run_iteration(self, batch: Data) -> float:
        """Run one iteration. Returns this rank's contribution to the mean loss over the batch's rows."""
        loss = self._module(batch)
        (loss * self._loss_factor).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach()) / ROWS


def shard_fully(stacked: StackedModel, plan: UniformPlan) -> StackedModel:
    """Apply FSDP2 to each block, and to embedding and head together.

    Stacked weights such as (3, hidden, hidden) are split along their first dimension that the replicas divide.
    """
    mesh = init_device_mesh("cpu", (plan.data,))

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(next(place for place, size in enumerate(parameter.shape) if size % plan.data == 0))

    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.sharding is Sharding.ZERO3,
        "shard_placement_fn": placement,
    }
    for block in stacked.layers[1:-1]:
        fully_shard(block, **options)
    fully_shard(stacked, **options)
    for module in stacked.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, as the executor does
            module.set_force_sum_reduction_for_comms(enable=True)
    return stacked


def make_optimizer(module: nn.Module, sharding: Sharding, learning_rate: float) -> torch.optim.Optimizer:
    if sharding is Sharding.ZERO1:
        return ZeroRedundancyOptimizer(
            module.parameters(), optimizer_class=torch.optim.Adam, parameters_as_bucket_view=True, lr=learning_rate,
            fused=True,
        )  # fmt: skip
    return torch.optim.Adam(module.parameters(), lr=learning_rate, fused=True)
