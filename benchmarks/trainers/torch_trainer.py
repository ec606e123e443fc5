"""Trainers of torch's own parts: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and the 1F1B pipeline.

The layers are the executor's classes with the executor's initial weights, so only the trainer differs. The optimizer is
torch's fused Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from trainers.plans import ROWS, UniformPlan
from trainwright.model import Model
from trainwright.plan import Sharding
from trainwright_worker.executor.executor import TrainingConfig
from trainwright_worker.layers.layer import Boundary, Data, Layer, SharedWeights
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

    @property
    def tied_weights(self) -> list[nn.Parameter]:
        """Return the weights that the model's first and last layer share, each once."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        return list({layer.get_parameter(name) for layer in layers for name in layer.shared_weights})

    def forward(self, received: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the last layer's hidden states, or after the head the sum over rows of their losses, shape (1,).

        A model's first layer receives tokens (rows, sequence), others hidden states (rows, sequence, hidden).
        """
        data = {"tokens": received} if targets is None else {"tokens": received, "targets": targets}
        boundary: Boundary = (received,)
        loss: Tensor | None = None
        for layer in self.layers:
            boundary, loss = layer(boundary, data)
        return boundary[0] if loss is None else loss.view(1)


class TorchTrainer:
    """Trainer of a plan on this rank of the world group; without stages if the plan has only one."""

    def __init__(self, plan: UniformPlan, model: Model, training: TrainingConfig) -> None:
        self._plan, self._seed, self._family = plan, training.seed, make_family_layers(model)
        mesh = init_device_mesh("cpu", (plan.stages, plan.data), mesh_dim_names=("stage", "replica"))
        self._stage, self._replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")
        stacked = StackedModel(model, plan.layers_of(self._stage, model), training.seed)
        self._tied_weights = stacked.tied_weights
        self._module = shard_data(stacked, plan, mesh["replica"])
        # DistributedDataParallel averages the replicas' gradients.
        self._loss_factor = (plan.data if isinstance(self._module, DistributedDataParallel) else 1) / ROWS
        self._pipeline = _Pipeline(self._module, plan, mesh, self._loss_factor) if plan.stages > 1 else None
        self._optimizer = make_optimizer(self._module, plan, mesh["replica"], training.learning_rate)

    def make_batch(self, iteration: int) -> Data:
        """Return this rank's rows of all micro-batches, the same as the executor's."""
        count = self._plan.replica_rows
        parts = [
            self._family.rows(
                ("tokens", "targets"), seed=self._seed, iteration=iteration, first=first + self._replica * count,
                count=count,
            )
            for first in range(0, ROWS, count * self._plan.data)
        ]  # fmt: skip
        return {field: torch.cat([part[field] for part in parts]) for field in parts[0]}

    def run_iteration(self, batch: Data) -> float:
        """Run one iteration. Returns this rank's contribution to the mean loss over the batch's rows."""
        if self._pipeline is None:
            loss = float(self._run_at_once(batch))
        else:
            loss = self._pipeline.run(batch)
            self._pipeline.sum_tied_gradients(self._tied_weights)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss / ROWS / self._loss_factor

    def _run_at_once(self, batch: Data) -> Tensor:
        loss: Tensor = self._module(batch["tokens"], batch["targets"]).sum() * self._loss_factor
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class _Pipeline:
    """1F1B schedule of one rank's stage."""

    def __init__(self, module: nn.Module, plan: UniformPlan, mesh: DeviceMesh, loss_factor: float) -> None:
        index = mesh.get_local_rank("stage")
        self._stage = PipelineStage(module, index, plan.stages, torch.device("cpu"), group=mesh["stage"].get_group())
        self._schedule = Schedule1F1B(
            self._stage, plan.micro_batches, lambda loss, _: loss.sum() * loss_factor, scale_grads=False
        )
        self._ends = self._group_of_ends(mesh)

    @staticmethod
    def _group_of_ends(mesh: DeviceMesh) -> dist.ProcessGroup:
        """Return the group of this replica's first and last stage, which hold a tied weight."""
        ends = [[int(ranks[0]), int(ranks[-1])] for ranks in mesh.mesh.T]
        groups: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in ends]
        return groups[mesh.get_local_rank("replica")]

    def run(self, batch: Data) -> float:
        """Compute the gradients of all micro-batches. Returns the sum of the losses that the schedule saw."""
        losses: list[Tensor] = []
        if self._stage.is_first:
            self._schedule.step(batch["tokens"], return_outputs=False)
        elif self._stage.is_last:
            targets = batch["targets"]
            self._schedule.step(target=targets, losses=losses, return_outputs=False, targets=targets)
        else:
            self._schedule.step(return_outputs=False)
        return sum(float(loss.detach()) for loss in losses)

    def sum_tied_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of weights that first and last stage share; torch's pipeline leaves that to its user."""
        for weight in weights:
            dist.all_reduce(weight.grad, group=self._ends)


def shard_data(stacked: StackedModel, plan: UniformPlan, mesh: DeviceMesh) -> nn.Module:
    """Return the module with the reduction over replicas that the plan's sharding asks for."""
    if plan.data == 1:
        return stacked
    if plan.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
        return shard_fully(stacked, plan, mesh)
    return DistributedDataParallel(stacked, process_group=mesh.get_group(), gradient_as_bucket_view=True)


def shard_fully(stacked: StackedModel, plan: UniformPlan, mesh: DeviceMesh) -> StackedModel:
    """Apply FSDP2 to each block, and to embedding and head together.

    Stacked weights such as (3, hidden, hidden) are split along their first dimension that the replicas divide.
    """

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


def make_optimizer(
    module: nn.Module, plan: UniformPlan, mesh: DeviceMesh, learning_rate: float
) -> torch.optim.Optimizer:
    if plan.sharding is Sharding.ZERO1:
        return ZeroRedundancyOptimizer(
            module.parameters(), optimizer_class=torch.optim.Adam, process_group=mesh.get_group(),
            parameters_as_bucket_view=True, lr=learning_rate, fused=True,
        )  # fmt: skip
    return torch.optim.Adam(module.parameters(), lr=learning_rate, fused=True)
