"""One rank's part of a plan: iterations of forwards, backwards, gradient sums and the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.cluster import Emulation
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright_worker.batches import token_rows
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.boundary import Inbox, Outbox
from trainwright_worker.executor.groups import Groups
from trainwright_worker.executor.mesh import Mesh, transfers
from trainwright_worker.executor.parameters import ParameterBuffer, make_optimizer
from trainwright_worker.executor.schedule import Operation, operations, received_before
from trainwright_worker.executor.stage import StageLayers, StagePace
from trainwright_worker.family import gpt_of
from trainwright_worker.layers.tensor_parallel import TensorShard


@dataclass(frozen=True, slots=True)
class Training:
    """How the weights start and change: the same for every plan of a comparison."""

    optimizer: str = "adam"
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank needs of an iteration's batch, by micro-batch: tokens in the first stage, targets in the last."""

    tokens: tuple[Tensor, ...] = ()
    targets: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """The process that an executor runs in.

    Attributes:
        rank: logical rank: the place of this process's device in the plan.
        emulation: the device's table where its speed is emulated.
        timeout: of each collective.
        beat: called with a word whenever something begins.
    """

    rank: int
    device: torch.device
    emulation: Emulation | None = None
    timeout: timedelta = timedelta(minutes=2)
    beat: Callable[[str], None] = lambda _doing: None


class Executor:
    """Runs one rank's part of a plan. All ranks of the plan make one and run the same iterations."""

    def __init__(self, plan: Plan, model: Model, training: Training, host: Host) -> None:
        self.model, self.training = model, training
        self.rank, self.device, self.beat = host.rank, host.device, host.beat
        rank, device, emulation = host.rank, host.device, host.emulation
        self.pipeline = plan.pipelines[0]
        self.gpt = gpt_of(model)
        self.batch_tokens = plan.global_batch_size * self.gpt.sequence_length
        self.mesh = Mesh.of(self.pipeline)
        self.stage_number = self.mesh.stage_of(rank)
        self.stage = self.mesh.stages[self.stage_number]
        self.replica, self.tensor_index = self.stage.position(rank)
        self.first_row, stop = self.stage.interval(self.replica)
        self.rows = stop - self.first_row
        self.pacer = Pacer(active=emulation is not None)
        split_owners = self._weights_shared_between_stages()
        self.groups = Groups.create(self.mesh, split_owners, rank, host.timeout)
        shard = TensorShard(self.tensor_index, self.stage.tensor, self._tensor_all_reduce)
        first, end = self.stage.first, self.stage.end
        self.layers = StageLayers(model, first, end, seed=training.seed, shard=shard).to(device)
        self.buffers = self._parameter_buffers(split_owners)
        self.optimizer = make_optimizer(training.optimizer, self.buffers, training.learning_rate)
        self.pace = StagePace.of(
            emulation,
            [model.kind_of(layer) for layer in range(first, end)],
            rows=self.rows,
            tensor=self.stage.tensor,
            values=self.layers.number_of_values,
        )
        self._prepare_operations(plan)
        self._prepare_boundaries()

    def _weights_shared_between_stages(self) -> dict[str, tuple[int, ...]]:
        owners: dict[str, list[int]] = {}
        for layer in range(len(self.model.layers)):
            name = self.model.kind_of(layer).shared_weight
            if name is not None:
                owners.setdefault(name, []).append(layer)
        stages = {name: self.mesh.owners(tuple(layers)) for name, layers in owners.items()}
        return {name: numbers for name, numbers in stages.items() if len(numbers) > 1}

    def _parameter_buffers(self, split_owners: dict[str, tuple[int, ...]]) -> list[ParameterBuffer]:
        """First a buffer of what the data replicas sum, then one for each weight owned by other stages too."""
        apart = {name: weight for name, weight in self.layers.shared.items() if name in split_owners}
        kept_apart = {id(weight) for weight in apart.values()}
        own = [parameter for parameter in self.layers.parameters() if id(parameter) not in kept_apart]
        buffers = [ParameterBuffer(own, self.groups.data)] if own else []
        for name, weight in sorted(apart.items()):
            degrees = {self.mesh.stages[number].tensor for number in split_owners[name]}
            contributes = len(degrees) == 1 or self.tensor_index == 0
            buffers.append(ParameterBuffer([weight], self.groups.shared[name], contributes=contributes))
        return buffers

    def _prepare_operations(self, plan: Plan) -> None:
        stages, micro_batches = len(self.mesh.stages), self.pipeline.micro_batches

        def order(stage: int) -> tuple[Operation, ...]:
            return operations(plan.schedule, stage=stage, stages=stages, micro_batches=micro_batches)

        number = self.stage_number
        self.operations = order(number)
        self._before = order(number - 1) if number > 0 else ()
        self._behind = order(number + 1) if number + 1 < stages else ()

    def _prepare_boundaries(self) -> None:
        number, stages = self.stage_number, self.mesh.stages
        shape = (self.rows, self.gpt.sequence_length, self.gpt.hidden_size)
        self.activations_in, self.gradients_out = None, None
        self.activations_out, self.gradients_in = None, None
        groups = self.groups
        if groups.forward_in is not None and groups.backward_out is not None:
            before = stages[number - 1]
            pieces = [piece for piece in transfers(before, self.stage) if piece.target == self.rank]
            back = [piece for piece in transfers(self.stage, before) if piece.source == self.rank]
            self.activations_in = Inbox(
                groups.forward_in, pieces, first_row=self.first_row, shape=shape, device=self.device
            )
            self.gradients_out = Outbox(groups.backward_out, back, first_row=self.first_row)
        if groups.forward_out is not None and groups.backward_in is not None:
            behind = stages[number + 1]
            pieces = [piece for piece in transfers(self.stage, behind) if piece.source == self.rank]
            back = [piece for piece in transfers(behind, self.stage) if piece.target == self.rank]
            self.activations_out = Outbox(groups.forward_out, pieces, first_row=self.first_row)
            self.gradients_in = Inbox(
                groups.backward_in, back, first_row=self.first_row, shape=shape, device=self.device
            )

    def _tensor_all_reduce(self, tensor: Tensor) -> None:
        self.pacer.interrupt()
        self.beat("summing within the tensor group")
        dist.all_reduce(tensor, group=self.groups.tensor)
        self.pacer.resume()

    def prepare(self, iteration: int) -> Batch:
        """This rank's part of that iteration's batch."""
        is_first, is_last = self.activations_in is None, self.activations_out is None
        if not (is_first or is_last):
            return Batch()
        tokens, targets = [], []
        for micro_batch in range(self.pipeline.micro_batches):
            row_tokens, row_targets = token_rows(
                self.gpt,
                seed=self.training.seed,
                iteration=iteration,
                first=micro_batch * self.pipeline.micro_batch_size + self.first_row,
                count=self.rows,
            )
            tokens.append(row_tokens.to(self.device))
            targets.append(row_targets.to(self.device))
        return Batch(tuple(tokens) if is_first else (), tuple(targets) if is_last else ())

    def run(self, batch: Batch) -> float:
        """One iteration. Returns this rank's share of the mean loss: 0 but on the last stage's first tensor ranks."""
        for buffer in self.buffers:
            buffer.clear()
        self.pacer.synchronize()
        loss = self._run_operations(batch)
        for buffer in self.buffers:
            self.beat("summing gradients")
            buffer.reduce()
        self.pacer.synchronize()
        self.pacer.start(self.pace.update, waited_seconds=0.0)
        self.optimizer.step()
        self.pacer.finish()
        for box in (self.activations_out, self.gradients_out):
            if box is not None:
                box.drain()
        return float(loss) if self.tensor_index == 0 else 0.0

    def _run_operations(self, batch: Batch) -> Tensor:
        loss = torch.zeros((), device=self.device)
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._post(self.operations[0])
        for number, operation in enumerate(self.operations):
            self.beat(str(operation))
            received, waited = self._take(operation)
            if number + 1 < len(self.operations):
                self._post(self.operations[number + 1])
            if operation.is_forward:
                kept[operation.micro_batch] = self._forward(operation.micro_batch, received, waited, batch)
                if self.activations_out is None:
                    loss += kept[operation.micro_batch][1].detach()
            else:
                activation, output = kept.pop(operation.micro_batch)
                self._backward(operation.micro_batch, activation, output, received, waited)
                del activation, output
        return loss

    def _post(self, operation: Operation) -> None:
        inbox = self.activations_in if operation.is_forward else self.gradients_in
        if inbox is not None:
            inbox.post()

    def _take(self, operation: Operation) -> tuple[Tensor | None, float]:
        """The tensor that the operation needs from its neighbour, and the seconds waited for it."""
        inbox, outbox, neighbour = self.gradients_in, self.activations_out, self._behind
        if operation.is_forward:
            inbox, outbox, neighbour = self.activations_in, self.gradients_out, self._before
        if inbox is None:
            return None, 0.0
        received, waited = inbox.take()
        if outbox is not None:
            outbox.release(
                received_before(neighbour, is_forward=operation.is_forward, micro_batch=operation.micro_batch)
            )
        return received, waited

    def _forward(self, micro_batch: int, received: Tensor | None, waited: float, batch: Batch) -> tuple[Tensor, Tensor]:
        activation = batch.tokens[micro_batch] if received is None else received.requires_grad_()
        targets = batch.targets[micro_batch] if batch.targets else None
        self.pacer.start(self.pace.forward, waited_seconds=waited)
        output = self.layers(activation, targets, self.batch_tokens)
        self.pacer.finish()
        if self.activations_out is not None:
            self.activations_out.send(micro_batch, output)
        return activation, output

    def _backward(
        self, micro_batch: int, activation: Tensor, output: Tensor, received: Tensor | None, waited: float
    ) -> None:
        self.pacer.start(self.pace.backward, waited_seconds=waited)
        torch.autograd.backward(output, received)
        self.pacer.finish()
        if self.gradients_out is not None:
            if activation.grad is None:
                raise RuntimeError(f"backward {micro_batch} left no gradient for the stage before")
            self.gradients_out.send(micro_batch, activation.grad)

    def close(self) -> None:
        """Give the plan's process groups back; all ranks do so at the same point."""
        self.groups.close()
