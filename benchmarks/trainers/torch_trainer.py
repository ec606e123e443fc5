"""Trainer of torch's own parts: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2, DTensor and the 1F1B pipeline.

The optimizer is torch's fused Adam.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from trainers.plans import FULLY_SHARDED, ROWS, UniformPlan
from trainers.torch_models import StageModel
from trainwright.families import Gpt, Llama
from trainwright.model import Model
from trainwright.strategy import Sharding
from trainwright_worker.executor.executor import TrainingConfig
from trainwright_worker.layers.layer import Data, FamilyLayers
from trainwright_worker.layers.registry import make_family_layers


class TorchTrainer:
    """Trainer of a plan on this rank of the world group; without stages if the plan has only one."""

    def __init__(self, plan: UniformPlan, model: Model, training: TrainingConfig) -> None:
        self._plan, self._seed, self._family = plan, training.seed, make_family_layers(model)
        mesh = init_device_mesh(
            "cpu", (plan.stages, plan.data, plan.tensor), mesh_dim_names=("stage", "replica", "tensor")
        )
        self._replica = mesh.get_local_rank("replica")
        self._counts_loss = mesh.get_local_rank("tensor") == 0
        self._stage_model = StageModel(model, plan.layers_of(mesh.get_local_rank("stage"), model), training.seed)
        if plan.tensor > 1:
            self._stage_model.divide(mesh["tensor"], along_sequence=plan.along_sequence)
        module = reduce_over_replicas(self._stage_model, plan, mesh["replica"])
        # DistributedDataParallel averages the replicas' gradients.
        self._loss_factor = (plan.data if isinstance(module, DistributedDataParallel) else 1) / ROWS
        self._module = module
        self._pipeline = _Pipeline(module, plan, mesh, self._loss_factor) if plan.stages > 1 else None
        self._optimizer = make_optimizer(module, plan, mesh["replica"], training.learning_rate)

    @staticmethod
    def knows(plan: UniformPlan, model: Model) -> bool:
        """Return whether torch's parts train the model under the plan; DTensor knows no ZeRO-1."""
        return isinstance(model.family, Gpt | Llama) and (plan.tensor == 1 or plan.sharding is not Sharding.ZERO1)

    def make_batch(self, iteration: int) -> Data:
        """Return this rank's rows of all micro-batches, the same as the executor's."""
        return make_rows(self._family, self._plan, self._replica, self._seed, iteration)

    def run_iteration(self, batch: Data) -> float:
        """Run one iteration. Returns this rank's contribution to the mean loss over the batch's rows."""
        with self._divided_loss():
            loss = float(self._run_at_once(batch)) if self._pipeline is None else self._pipeline.run(batch)
        if self._pipeline is not None and self._stage_model.tied_weight is not None:
            self._pipeline.sum_tied_gradient(self._stage_model.tied_weight)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss / ROWS / self._loss_factor if self._counts_loss else 0.0

    def _divided_loss(self) -> AbstractContextManager[None]:
        """Return the context in which the loss is computed of logits that a tensor group divides."""
        return loss_parallel() if self._plan.tensor > 1 else nullcontext()

    def _run_at_once(self, batch: Data) -> Tensor:
        loss: Tensor = self._module(batch["tokens"], batch["targets"]).sum() * self._loss_factor
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def make_rows(family: FamilyLayers, plan: UniformPlan, replica: int, seed: int, iteration: int) -> Data:
    """Return a replica's rows of all micro-batches, in their order."""
    count = plan.replica_rows
    parts = [
        family.rows(
            ("tokens", "targets"), seed=seed, iteration=iteration, first=first + replica * count, count=count
        )
        for first in range(0, ROWS, count * plan.data)
    ]  # fmt: skip
    return {field: torch.cat([part[field] for part in parts]) for field in parts[0]}


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
        """Return the group of the first and last stage's ranks with this rank's part of a tied weight."""
        ends = mesh.mesh[[0, -1]].flatten(1).T.tolist()
        groups: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in ends]
        _, _, tensor = mesh.mesh.shape
        return groups[mesh.get_local_rank("replica") * tensor + mesh.get_local_rank("tensor")]

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

    def sum_tied_gradient(self, weight: Tensor) -> None:
        """Sum the gradient of a weight that first and last stage share; torch's pipeline leaves that to its user."""
        gradient = weight.grad
        if isinstance(weight, DTensor) and isinstance(gradient, DTensor):
            # An embedding leaves each rank of a tensor group the gradient of the whole vocabulary.
            weight.grad = gradient.redistribute(placements=weight.placements)
            gradient = weight.grad.to_local()
        dist.all_reduce(gradient, group=self._ends)


def reduce_over_replicas(stage: StageModel, plan: UniformPlan, mesh: DeviceMesh) -> nn.Module:
    """Return the module with the reduction over replicas that the plan's sharding asks for."""
    if plan.data == 1:
        return stage
    if plan.sharding in FULLY_SHARDED:
        for module in (*stage.blocks, stage):
            fully_shard(module, mesh=mesh, reshard_after_forward=plan.sharding is Sharding.ZERO3)
    elif plan.tensor > 1:  # DistributedDataParallel knows no DTensor
        for module in (*stage.blocks, stage):
            replicate(module, mesh=mesh)
    else:
        return DistributedDataParallel(stage, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, as the executor does
            module.set_force_sum_reduction_for_comms(enable=True)
    return stage


def make_optimizer(
    module: nn.Module, plan: UniformPlan, mesh: DeviceMesh, learning_rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer; parameters of one mesh are updated together."""
    if plan.sharding is Sharding.ZERO1:
        return ZeroRedundancyOptimizer(
            module.parameters(), optimizer_class=torch.optim.Adam, process_group=mesh.get_group(),
            parameters_as_bucket_view=True, lr=learning_rate, fused=True,
        )  # fmt: skip
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return torch.optim.Adam([{"params": found} for found in by_mesh.values()], lr=learning_rate, fused=True)
