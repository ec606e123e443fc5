"""Executor of a plan: runs one rank's training iterations in the order of the plan's schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.cluster import Device, Emulation
from trainwright.families import Custom
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.timeline import Action
from trainwright_worker.device import RunAheadLimit, read_value
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.batch_weight import BatchWeight
from trainwright_worker.executor.boundary_exchange import BoundaryExchange, BoundarySpec
from trainwright_worker.executor.emulated_pacing import EmulatedStagePace, pace_operators
from trainwright_worker.executor.flat_parameter import publish_updates
from trainwright_worker.executor.layer_passes import LayerPasses, MicroBatchRows
from trainwright_worker.executor.operator_stage import OperatorStageBuilder
from trainwright_worker.executor.optimizer import (
    GradientNorm,
    GradientScaling,
    LossScale,
    Optimizer,
    make_optimizer,
)
from trainwright_worker.executor.plan_ranks import PlanRanks, Ranks
from trainwright_worker.executor.process_groups import ProcessGroups, TensorGroup, required_groups
from trainwright_worker.executor.recorder import Recorder
from trainwright_worker.executor.stage_module import TORCH_DTYPES, StageBuilder
from trainwright_worker.executor.stage_order import Operation, StageOrder
from trainwright_worker.executor.torch_optimizer import OptimizerChoice, TorchOptimizer
from trainwright_worker.layers.layer import Boundary, Data, ReadRows, to_device
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.synthetic_data import hash_seed


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Training hyperparameters, equal for all plans under comparison.

    Attributes:
        optimizer: one of the worker's own, by name, with `learning_rate`; or a user's, which has its own.
        clip_norm: maximum norm of the gradients over all weights; None disables clipping.
    """

    optimizer: str | OptimizerChoice = "adam"
    learning_rate: float = 1e-3
    seed: int = 0
    clip_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Data of one rank in one iteration: `rows[run][micro_batch]`."""

    iteration: int
    rows: tuple[tuple[MicroBatchRows, ...], ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for run in self.rows for rows in run for tensor in rows.fields.values()]


@dataclass(frozen=True, slots=True)
class RankContext:
    """Process that an executor runs in.

    Attributes:
        rank: index of this process's device in `devices`.
        devices: devices of all processes, by rank; None if they are the plan's own, in its order.
        emulation: device table, if the device's speed is emulated.
        beat: called with a description whenever an action begins.
    """

    rank: int
    device: torch.device
    devices: tuple[Device, ...] | None = None
    emulation: Emulation | None = None
    beat: Callable[[str], None] = lambda _doing: None


class PlanExecutor:
    """Executor of one rank's part of a plan. All ranks of the plan construct one and run the same iterations.

    Ranks outside the plan must create the same process groups meanwhile: `groups.prepare(required_groups(…))`.

    Attributes:
        skipped_updates: iterations whose gradients overflowed, so that they updated nothing.
        empty_batches: iterations whose rows all had weight 0, so that they updated nothing.
        batch_weight: by which the sum of losses of a batch is divided.
    """

    def __init__(
        self, plan: Plan, model: Model, training: TrainingConfig, context: RankContext, groups: ProcessGroups
    ) -> None:
        self.plan, self.model, self.training = plan, model, training
        self.rank, self.device, self.beat = context.rank, context.device, context.beat
        self.plan_ranks = PlanRanks.of(plan, context.devices)
        self.groups = groups
        needed_groups = required_groups(self.plan_ranks, model)
        self.groups.prepare(needed_groups)
        self.family_layers = make_family_layers(model)
        self.pacer = Pacer(active=context.emulation is not None)
        self.recorder = Recorder(self.device)
        self.run_ahead = RunAheadLimit.of(self.device)
        self.stage_ranks = self.plan_ranks.stage_of(self.rank)
        self.pipeline = plan.pipelines[self.stage_ranks.pipeline]
        has_operators = self.stage_ranks.operators is not None
        make_builder = OperatorStageBuilder if has_operators else StageBuilder
        builder = make_builder(
            model,
            self.family_layers,
            self.plan_ranks,
            self.rank,
            self.groups,
            self.device,
            self._collectives,
            self.beat,
        )
        self.stage = builder.build(training.seed)
        self.optimizer: Optimizer = (
            make_optimizer(training.optimizer, self.stage.flat_parameters, training.learning_rate)
            if isinstance(training.optimizer, str)
            else TorchOptimizer(self.stage.flat_parameters, training.optimizer, plan, self.device)
        )
        if has_operators:
            rows = self.pipeline.micro_batch_size
            self.pace = pace_operators(context.emulation, model, self.stage, rows, self.pacer)
        else:
            self.pace = EmulatedStagePace.of(context.emulation, model, self.stage, self.rank)
        self.passes = LayerPasses(self.stage, self.rank, self.groups, self.pacer, self.recorder, self.beat)
        self.loss_scale = LossScale(active=model.dtype is Dtype.FLOAT16)
        self.skipped_updates = self.empty_batches = 0
        all_ranks = self.groups.group_of(self.plan_ranks.ranks)
        self.batch_weight = BatchWeight(self.family_layers, plan.global_batch_size, all_ranks)
        self.gradient_norm = GradientNorm(self.stage.squared_norms, all_ranks, self.device)
        BoundaryExchange.warm_up(needed_groups, self.rank, groups, self.device, self.beat)
        self.boundaries = BoundaryExchange.of(self.plan_ranks, self.rank, groups, model, self._boundary_spec_after)
        self.order = StageOrder.of(
            plan.schedule,
            stage=self.stage_ranks.index,
            stages=len(self.pipeline.stages),
            micro_batches=self.pipeline.micro_batches,
        )
        self._has_run = False

    def _boundary_spec_after(self, layer: int) -> BoundarySpec:
        shapes = self.family_layers.boundary(layer)
        is_own_model = isinstance(self.model.family, Custom)
        formats = None if is_own_model else (TORCH_DTYPES[self.model.dtype],) * len(shapes)
        return BoundarySpec(shapes, formats, self.device)

    def _collectives(self, ranks: Ranks) -> TensorGroup:
        group = self.groups.group_of(tuple(sorted(ranks)))
        return TensorGroup(group, ranks, self.rank, self.pacer, self.recorder, self.beat)

    def make_batch(self, iteration: int, read_rows: ReadRows | None = None) -> Batch:
        """Return this rank's data of one iteration; row i of the batch is the same under every plan.

        `read_rows`: other rows than the model's own.
        """
        read_rows = read_rows or self.family_layers.rows
        rows_by_run = []
        for run in self.stage.runs:
            fields = tuple(dict.fromkeys(field for layer in run for field in layer.module.reads))
            start, stop = self.stage_ranks.row_interval(run[0].run, self.rank)
            first = self.plan_ranks.first_row(self.stage_ranks.pipeline) + start
            rows_by_run.append(
                tuple(
                    self._rows(
                        read_rows, fields, iteration, first + number * self.pipeline.micro_batch_size, stop - start
                    )
                    for number in range(self.pipeline.micro_batches)
                )
            )
        return Batch(iteration, tuple(rows_by_run))

    def _rows(
        self, read_rows: ReadRows, fields: tuple[str, ...], iteration: int, first: int, count: int
    ) -> MicroBatchRows:
        seed = self.training.seed
        rows: Data = {}
        if fields:
            rows = read_rows(fields, seed=seed, iteration=iteration, first=first, count=count)
        on_device = to_device(rows, self.device, TORCH_DTYPES[self.model.dtype], self.model.float32_fields)
        return MicroBatchRows(on_device, hash_seed(seed, iteration, first))

    def run_iteration(self, batch: Batch) -> float:
        """Run one iteration. Returns this rank's contribution to the mean loss over the batch; NaN if that weighs nothing."""
        for flat_parameter in self.stage.flat_parameters:
            flat_parameter.zero_gradients()
        self.passes.clear_loss()
        self.pacer.reset_due()
        self._run_operations(batch)
        self.beat("summing gradients")
        for number, reduction in enumerate(self.stage.reductions):
            with self.recorder.action(Action.GRADIENTS, number):
                reduction.finish()
        scaling = self._gradient_scaling()
        self._update(scaling)
        with self.recorder.action(Action.WAIT):
            self.boundaries.wait_for_sends()
        self.beat(f"waiting for the device to finish iteration {batch.iteration}: reading the loss")
        loss = self.batch_weight.mean_loss(self.passes.loss, self.passes.weight)
        self._count_update(scaling)
        return loss

    def evaluate(self, batch: Batch) -> float:
        """Run forwards alone, in evaluation mode. Returns this rank's contribution to the mean loss over the batch."""
        modules = [module for layer in self.stage.layers for module in layer.module.modules() if module.training]
        for module in modules:
            module.training = False
        self.passes.clear_loss()
        receiver, sender = self.boundaries.activation_receiver, self.boundaries.activation_sender
        for micro_batch in range(self.pipeline.micro_batches):
            self.beat(f"evaluating {micro_batch}")
            self.run_ahead.wait()
            boundary: Boundary = ()
            if receiver is not None:
                receiver.post_receive()
                boundary, _ = receiver.wait_for_next()
            boundary = self.passes.evaluate(micro_batch, boundary, [run[micro_batch] for run in batch.rows])
            if sender is not None:
                sender.send(micro_batch, boundary)
                sender.wait_for_sends([micro_batch - len(self.pipeline.stages)])
            self.run_ahead.mark()
        self.boundaries.wait_for_sends()
        for flat_parameter in (*self.stage.flat_parameters, *self.stage.frozen_parameters):
            flat_parameter.reshard()
        for module in modules:
            module.training = True
        self.batch_weight.sum(self.passes.weight)
        return self.batch_weight.mean_loss(self.passes.loss, self.passes.weight)

    def _update(self, scaling: GradientScaling | None) -> None:
        self.pacer.reset_due()
        with self.recorder.action(Action.UPDATE):
            self.pacer.start(self.pace.update, waited_seconds=0.0)
            self.optimizer.step(scaling)
            self.pacer.end()
        is_published = any(flat_parameter.gathers_after_update for flat_parameter in self.stage.flat_parameters)
        with self.recorder.action(Action.GATHER) if is_published else nullcontext():
            publish_updates(self.stage.flat_parameters)

    def _gradient_scaling(self) -> GradientScaling | None:
        """Return how the update scales gradients, from their norm over all ranks; None if it takes them as they are.

        Backwards divide by the rows of the batch, since its weight is not known before all forwards have ended.
        """
        needs_norm = self.training.clip_norm is not None or self.loss_scale.active
        if not (needs_norm or self.batch_weight.is_summed):
            return None
        with self.recorder.action(Action.GRADIENTS):
            if self.batch_weight.is_summed:
                self.beat("summing the weights of the batch over all ranks")
            weight_per_row = self.batch_weight.sum(self.passes.weight)
            norm = torch.zeros_like(self.passes.weight)
            if needs_norm:
                self.beat("taking the norm of the gradients over all ranks")
                norm = self.gradient_norm.compute()
            return GradientScaling.of(norm, self.loss_scale.factor, self.training.clip_norm, weight_per_row)

    def _count_update(self, scaling: GradientScaling | None) -> None:
        """Count the update and adjust the loss scale, once the device has finished."""
        if self.batch_weight.value == 0:
            self.empty_batches += 1
            return
        overflowed = scaling is not None and bool(read_value(scaling.overflow))
        self.optimizer.updates += not overflowed
        self.skipped_updates += overflowed
        self.loss_scale.update(overflowed=overflowed, weight_per_row=self.batch_weight.per_row)

    def _run_operations(self, batch: Batch) -> None:
        """Run the stage's operations. The next one's receive is posted ahead, but in the first iteration, which loads kernels."""
        self._post_receive(self.order.own[0])
        for number, operation in enumerate(self.order.own):
            self.beat(str(operation))
            self.run_ahead.wait()
            with self.recorder.action(Action.WAIT, operation.micro_batch):
                boundary, waited_seconds = self._wait_for_boundary(operation)
            is_last = number + 1 == len(self.order.own)
            posts_ahead = not is_last and self._has_run and self.order.may_post_ahead(number)
            if posts_ahead:
                self._post_receive(self.order.own[number + 1])
            if operation.is_forward:
                self._forward(operation.micro_batch, boundary, waited_seconds, batch)
            else:
                self._backward(operation.micro_batch, boundary, waited_seconds, is_last=is_last)
            self.run_ahead.mark()
            if not is_last and not posts_ahead:
                self._post_receive(self.order.own[number + 1])
        self._has_run = True

    def _post_receive(self, operation: Operation) -> None:
        receiver = self.boundaries.activation_receiver if operation.is_forward else self.boundaries.gradient_receiver
        if receiver is not None:
            receiver.post_receive()

    def _wait_for_boundary(self, operation: Operation) -> tuple[Boundary, float]:
        """Return the boundary that the operation needs from its neighbour, and the seconds waited for it."""
        exchange = self.boundaries
        receiver, sender = exchange.gradient_receiver, exchange.activation_sender
        if operation.is_forward:
            receiver, sender = exchange.activation_receiver, exchange.gradient_sender
        if receiver is None:
            return (), 0.0
        boundary, waited_seconds = receiver.wait_for_next()
        if sender is not None:
            sender.wait_for_sends(self.order.delivered_before(operation))
        return boundary, waited_seconds

    def _forward(self, micro_batch: int, received: Boundary, waited_seconds: float, batch: Batch) -> None:
        with self.recorder.action(Action.FORWARD, micro_batch):
            self.pacer.start(self.pace.forward, waited_seconds=waited_seconds)
            boundary = self.passes.forward(micro_batch, received, [run[micro_batch] for run in batch.rows])
            self.pacer.end()
        if self.boundaries.activation_sender is not None:
            self.boundaries.activation_sender.send(micro_batch, boundary)

    def _backward(self, micro_batch: int, output_gradients: Boundary, waited_seconds: float, *, is_last: bool) -> None:
        loss_gradient = self.loss_scale.factor / self.plan.global_batch_size
        with self.recorder.action(Action.BACKWARD, micro_batch):
            self.pacer.start(self.pace.last_backward if is_last else self.pace.backward, waited_seconds=waited_seconds)
            gradients = self.passes.backward(micro_batch, output_gradients, loss_gradient, is_last=is_last)
            self.pacer.end()
        if self.boundaries.gradient_sender is not None:
            self.boundaries.gradient_sender.send(micro_batch, gradients)
