"""One rank's part of a plan: iterations of forwards, backwards, gradient sums and the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.cluster import Device, Emulation
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.timeline import Action
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.boundaries import Boundaries
from trainwright_worker.executor.groups import Groups, wanted_groups
from trainwright_worker.executor.mesh import Mesh, RunMesh
from trainwright_worker.executor.messages import Form
from trainwright_worker.executor.optimizer import make_optimizer
from trainwright_worker.executor.pace import StagePace
from trainwright_worker.executor.passes import Passes
from trainwright_worker.executor.precision import GradientNorm, LossScale
from trainwright_worker.executor.schedule import Operation, operations, received_before
from trainwright_worker.executor.stage import TORCH_DTYPES, StageBuilder
from trainwright_worker.executor.tensor_group import TensorGroup
from trainwright_worker.executor.timeline import Recorder
from trainwright_worker.layers.layer import Boundary, Data, on_device
from trainwright_worker.layers.of_model import layers_of


@dataclass(frozen=True, slots=True)
class Training:
    """How the weights start and change: the same for every plan of a comparison.

    Attributes:
        clip_norm: gradients are shrunk so that their norm over all weights is at most this; None leaves them.
        sequence_parallel: whether tensor-parallel layers that can, and whose sequence their degree divides, keep but a
            part of it on each rank. What is computed is the same.
    """

    optimizer: str = "adam"
    learning_rate: float = 1e-3
    seed: int = 0
    clip_norm: float | None = None
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank needs of an iteration's batch: by run of its stage and micro-batch, the fields that its layers read."""

    fields: tuple[tuple[Data, ...], ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for run in self.fields for data in run for tensor in data.values()]


@dataclass(frozen=True, slots=True)
class Host:
    """The process that an executor runs in.

    Attributes:
        rank: of this process: the place of its device among `devices`.
        devices: of all processes, by rank; None where they are the plan's own, in its order.
        emulation: the device's table where its speed is emulated.
        beat: called with a word whenever something begins.
    """

    rank: int
    device: torch.device
    devices: tuple[Device, ...] | None = None
    emulation: Emulation | None = None
    beat: Callable[[str], None] = lambda _doing: None


class Executor:
    """Runs one rank's part of a plan. All ranks of the plan make one and run the same iterations.

    Other ranks of the world make the same groups meanwhile: `groups.make(wanted_groups(…))`.
    """

    def __init__(self, plan: Plan, model: Model, training: Training, host: Host, groups: Groups) -> None:
        self.plan, self.model, self.training = plan, model, training
        self.rank, self.device, self.beat = host.rank, host.device, host.beat
        self.mesh = Mesh.of(plan, host.devices)
        self.groups = groups
        self.groups.make(wanted_groups(self.mesh, model))
        self.family = layers_of(model)
        self.pacer = Pacer(active=host.emulation is not None)
        self.recorder = Recorder(self.device)
        self.place = self.mesh.stage_of(self.rank)
        self.pipeline = plan.pipelines[self.place.pipeline]
        self.stage = StageBuilder(
            model,
            self.family,
            self.mesh,
            self.rank,
            self.groups,
            self.device,
            self._tensor_group,
            training.sequence_parallel,
        ).build(training.seed)
        self.optimizer = make_optimizer(training.optimizer, self.stage.units, training.learning_rate)
        self.pace = StagePace.of(host.emulation, model, self.stage, self.rank)
        self.passes = Passes(self.stage, self.rank, self.groups, self.pacer, self.recorder, self.beat)
        self.loss_scale = LossScale(active=model.dtype is Dtype.FLOAT16)
        self.norm = GradientNorm(self.stage.counted, self.groups.of(self.mesh.ranks), self.device)
        Boundaries.connect(self.mesh, self.rank, groups, self.device)
        self.boundaries = Boundaries.of(self.mesh, self.rank, self.groups, self._form_behind)
        self._prepare_operations()

    def _form_behind(self, layer: int) -> Form:
        return Form(self.family.boundary(layer), TORCH_DTYPES[self.model.dtype], self.device)

    def _prepare_operations(self) -> None:
        stages, micro_batches = len(self.pipeline.stages), self.pipeline.micro_batches

        def order(stage: int) -> tuple[Operation, ...]:
            return operations(self.plan.schedule, stage=stage, stages=stages, micro_batches=micro_batches)

        number = self.place.number
        self.operations = order(number)
        self._before = order(number - 1) if number > 0 else ()
        self._behind = order(number + 1) if number + 1 < stages else ()

    def _tensor_group(self, run: RunMesh) -> TensorGroup:
        ranks = run.replica_ranks(self.rank)
        return TensorGroup(self.groups.of(ranks), ranks, self.rank, self.pacer, self.recorder, self.beat)

    def prepare(self, iteration: int) -> Batch:
        """This rank's part of that iteration's batch; row i of it is the same whatever the plan."""
        found = []
        for run in self.stage.runs:
            fields = tuple(dict.fromkeys(field for layer in run for field in layer.module.reads))
            start, stop = run[0].run.rows_of(self.rank)
            first = self.mesh.first_row(self.place.pipeline) + start
            found.append(
                tuple(
                    self._rows(fields, iteration, first + number * self.pipeline.micro_batch_size, stop - start)
                    for number in range(self.pipeline.micro_batches)
                )
            )
        return Batch(tuple(found))

    def _rows(self, fields: tuple[str, ...], iteration: int, first: int, count: int) -> Data:
        if not fields:
            return {}
        rows = self.family.rows(fields, seed=self.training.seed, iteration=iteration, first=first, count=count)
        return on_device(rows, self.device, TORCH_DTYPES[self.model.dtype])

    def run(self, batch: Batch) -> float:
        """One iteration. Returns this rank's share of the mean loss over the rows of the batch."""
        for unit in self.stage.units:
            unit.begin()
        self.passes.clear_loss()
        self.pacer.synchronize()
        self._run_operations(batch)
        self.beat("summing gradients")
        with self.recorder.action(Action.GRADIENTS):
            self.passes.settle()
        for number, reduction in enumerate(self.stage.reductions):
            with self.recorder.action(Action.GRADIENTS, number):
                reduction.finish()
        if self._may_update():
            self._update()
        with self.recorder.action(Action.WAIT):
            self.boundaries.drain()
        return float(self.passes.loss) / self.plan.global_batch_size

    def _update(self) -> None:
        self.pacer.synchronize()
        with self.recorder.action(Action.UPDATE):
            self.pacer.start(self.pace.update, waited_seconds=0.0)
            self.optimizer.step()
            self.pacer.finish()
        is_published = any(unit.is_published for unit in self.stage.units)
        with self.recorder.action(Action.GATHER) if is_published else nullcontext():
            for unit in self.stage.units:
                unit.publish()

    def _may_update(self) -> bool:
        """Unscale and clip the gradients where that is asked for; False where they overflowed and must not be used."""
        limit = self.training.clip_norm
        if limit is None and not self.loss_scale.active:
            return True
        factor = 1.0 / self.loss_scale.factor
        with self.recorder.action(Action.GRADIENTS):
            norm = self.norm.of_all() * factor
        overflowed = not math.isfinite(norm)
        self.loss_scale.update(overflowed=overflowed)
        if overflowed and self.loss_scale.active:
            return False
        if limit is not None and norm > limit:
            factor *= limit / norm
        if factor != 1.0:
            self.norm.shrink(factor)
        return True

    def _run_operations(self, batch: Batch) -> None:
        self._post(self.operations[0])
        for number, operation in enumerate(self.operations):
            self.beat(str(operation))
            with self.recorder.action(Action.WAIT, operation.micro_batch):
                received, waited = self._take(operation)
            is_last = number + 1 == len(self.operations)
            if not is_last:
                self._post(self.operations[number + 1])
            if operation.is_forward:
                self._forward(operation.micro_batch, received, waited, batch)
            else:
                self._backward(operation.micro_batch, received, waited, is_last=is_last)

    def _post(self, operation: Operation) -> None:
        inbox = self.boundaries.activations_in if operation.is_forward else self.boundaries.gradients_in
        if inbox is not None:
            inbox.post()

    def _take(self, operation: Operation) -> tuple[Boundary, float]:
        """The boundary that the operation needs from its neighbour, and the seconds waited for it."""
        ends = self.boundaries
        inbox, outbox, neighbour = ends.gradients_in, ends.activations_out, self._behind
        if operation.is_forward:
            inbox, outbox, neighbour = ends.activations_in, ends.gradients_out, self._before
        if inbox is None:
            return (), 0.0
        received, waited = inbox.take()
        if outbox is not None:
            outbox.release(
                received_before(neighbour, is_forward=operation.is_forward, micro_batch=operation.micro_batch)
            )
        return received, waited

    def _forward(self, micro_batch: int, received: Boundary, waited: float, batch: Batch) -> None:
        with self.recorder.action(Action.FORWARD, micro_batch):
            self.pacer.start(self.pace.forward, waited_seconds=waited)
            boundary = self.passes.forward(micro_batch, received, [run[micro_batch] for run in batch.fields])
            self.pacer.finish()
        if self.boundaries.activations_out is not None:
            self.boundaries.activations_out.send(micro_batch, boundary)

    def _backward(self, micro_batch: int, received: Boundary, waited: float, *, is_last: bool) -> None:
        loss_gradient = self.loss_scale.factor / self.plan.global_batch_size
        with self.recorder.action(Action.BACKWARD, micro_batch):
            self.pacer.start(self.pace.last_backward if is_last else self.pace.backward, waited_seconds=waited)
            gradients = self.passes.backward(micro_batch, received, loss_gradient, is_last=is_last)
            self.pacer.finish()
        if self.boundaries.gradients_out is not None:
            self.boundaries.gradients_out.send(micro_batch, gradients)
