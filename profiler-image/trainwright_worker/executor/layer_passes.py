"""Forward and backward passes of one rank, layer by layer.

Each layer has its own autograd graph: boundaries are detached. So weights can be gathered before a layer and resharded
after it, rows can move between layers, a layer can be recomputed, and gradients can be reduced as soon as a layer is
done, all without autograd hooks.

A boundary is scattered along the sequence before consecutive sequence-parallel layers and gathered after them, and
gradients in the opposite direction. Between stages it stays divided if the series goes on in the next one
(`rank_layout.divides_boundary`). Elsewhere boundaries and gradients are replicated over the tensor group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainwright.timeline import Action
from trainwright_worker.device import seed_random_numbers
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.boundary_exchange import RowRelayout
from trainwright_worker.executor.emulated_pacing import needs_relayout
from trainwright_worker.executor.forward_observer import ForwardObserver
from trainwright_worker.executor.gradient_reduction import Reduction
from trainwright_worker.executor.process_groups import ProcessGroups, Purpose
from trainwright_worker.executor.recomputed_forward import BufferValues, RecomputedForward
from trainwright_worker.executor.recorder import Recorder
from trainwright_worker.executor.stage_module import RankLayer, StageModule
from trainwright_worker.layers.layer import Boundary, Data, Output
from trainwright_worker.synthetic_data import hash_seed


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """Rows that a run of layers computes in one micro-batch.

    Attributes:
        seed: follows from the training's seed, the iteration and the first row, so ranks of a tensor group have the same.
            Layers that draw random numbers are seeded with it before each forward, so that recomputation repeats them
            under any schedule; other layers' numbers need not be stored and restored.
    """

    fields: Data
    seed: int


@dataclass(frozen=True, slots=True)
class _StoredForward:
    """State that a forward stores for its backward.

    Attributes:
        inputs: zeros that take no memory, as gradients of the inputs, if there is no backward.
        output: None if it is recomputed, or there is no backward.
        buffers: values that a recompute finds in the layer's changed buffers.
    """

    inputs: Boundary
    rows: MicroBatchRows
    output: Output | None
    buffers: BufferValues = ()


class LayerPasses:
    """Passes of a rank's stage.

    Attributes:
        loss: loss summed over this rank's rows so far; zero if another rank of the tensor group counts them.
        weight: likewise the weights of rows, where a user's loss has some.
        observer: sees every layer's forward, if there is one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (different parts of the executor)
        self,
        stage: StageModule,
        rank: int,
        groups: ProcessGroups,
        pacer: Pacer,
        recorder: Recorder,
        beat: Callable[[str], None],
    ) -> None:
        self._stage, self._rank, self._pacer, self._recorder, self._beat = stage, rank, pacer, recorder, beat
        self._layers = stage.layers
        self._layer_index = {layer.number: place for place, layer in enumerate(self._layers)}
        self._recomputed = {
            layer.number: RecomputedForward(layer.number, layer.module) for layer in self._layers if layer.is_recomputed
        }
        self._in_flight: dict[int, list[_StoredForward]] = {}
        self._last_reductions: tuple[Reduction, ...] = ()
        self.loss = torch.zeros((), device=recorder.device)
        self.weight = torch.zeros((), dtype=torch.float64, device=recorder.device)
        self.observer: ForwardObserver | None = None
        self._forward_relayouts: dict[int, RowRelayout] = {}
        self._backward_relayouts: dict[int, RowRelayout] = {}
        for place in range(1, len(stage.runs)):
            if needs_relayout(stage, place):
                old, new = stage.runs[place - 1][0].run, stage.runs[place][0].run
                group = groups.group_of(old.ranks, Purpose.RELAYOUT)
                self._forward_relayouts[place] = RowRelayout(group, old, new, rank)
                self._backward_relayouts[place] = RowRelayout(group, new, old, rank)

    def clear_loss(self) -> None:
        self.loss.zero_()
        self.weight.zero_()

    def forward(self, micro_batch: int, boundary: Boundary, rows: Sequence[MicroBatchRows]) -> Boundary:
        """Return the stage's output boundary. `rows`: those of each run."""
        stored: list[_StoredForward] = []
        boundary = self._forward(micro_batch, boundary, rows, stored)
        self._in_flight[micro_batch] = stored
        return boundary

    @torch.no_grad()
    def evaluate(self, micro_batch: int, boundary: Boundary, rows: Sequence[MicroBatchRows]) -> Boundary:
        """Return the stage's output boundary of a forward that no backward follows."""
        return self._forward(micro_batch, boundary, rows, None)

    def _forward(
        self,
        micro_batch: int,
        boundary: Boundary,
        rows: Sequence[MicroBatchRows],
        stored: list[_StoredForward] | None,
    ) -> Boundary:
        for run_index, run in enumerate(self._stage.runs):
            if run_index in self._forward_relayouts:
                with self._communication(Action.MOVE):
                    boundary = self._forward_relayouts[run_index].relayout(boundary)
            for layer in run:
                self._beat(f"forward {micro_batch}, layer {layer.number}")
                boundary = self._forward_layer(layer, boundary, rows[run_index], stored)
        return boundary

    def _forward_layer(
        self, layer: RankLayer, boundary: Boundary, rows: MicroBatchRows, stored: list[_StoredForward] | None
    ) -> Boundary:
        self._unshard_weights(layer, self._layer_index[layer.number] + 1)
        if layer.scatters_boundary:
            boundary = layer.scatter_boundary(boundary)
        laid_out = layer.module.lay_out(tuple(tensor.detach() for tensor in boundary))
        needs_gradients = layer.needs_input_gradients
        inputs = tuple(tensor.requires_grad_(needs_gradients and tensor.is_floating_point()) for tensor in laid_out)
        buffers: BufferValues = ()
        if layer.without_backward:
            with torch.no_grad():
                output = self._compute(layer, _seed(layer, rows), inputs, _fields(layer, rows))
            inputs = tuple(map(_zeros, inputs))
        elif layer.is_recomputed and stored is not None:
            with torch.no_grad():
                output, buffers = self._recomputed[layer.number].run(
                    inputs, _fields(layer, rows), partial(self._compute, layer, _seed(layer, rows))
                )
        else:
            output = self._compute(layer, _seed(layer, rows), inputs, _fields(layer, rows))
        if output.loss is not None and layer.counts_loss:
            self.loss += output.loss.detach()
            if output.weight is not None:
                self.weight += output.weight
        if self.observer is not None:
            self.observer.observe(layer.number, layer.module, output, _seed(layer, rows), counts_loss=layer.counts_loss)
        if stored is not None:
            keeps_output = not (layer.is_recomputed or layer.without_backward)
            stored.append(_StoredForward(inputs, rows, output if keeps_output else None, buffers))
        self._reshard_weights(layer, is_last_pass=False)
        return layer.gather_boundary(output.boundary) if layer.gathers_boundary else output.boundary

    def backward(self, micro_batch: int, gradients: Boundary, loss_gradient: float, *, is_last: bool) -> Boundary:
        """Return the gradients for the previous stage. `is_last`: no later backward accumulates into the weights' gradients."""
        stored = self._in_flight.pop(micro_batch)
        for run_index in reversed(range(len(self._stage.runs))):
            for layer in reversed(self._stage.runs[run_index]):
                self._beat(f"backward {micro_batch}, layer {layer.number}")
                gradients = self._backward_layer(layer, stored.pop(), gradients, loss_gradient)
                self._reshard_weights(layer, is_last_pass=is_last)
                if is_last:
                    self._start_reductions(layer)
            if run_index in self._backward_relayouts:
                with self._communication(Action.MOVE):
                    gradients = self._backward_relayouts[run_index].relayout(gradients)
        return gradients

    def _backward_layer(
        self, layer: RankLayer, stored: _StoredForward, gradients: Boundary, loss_gradient: float
    ) -> Boundary:
        if layer.without_backward:
            return stored.inputs
        before = self._layer_index[layer.number] - 1
        self._unshard_weights(layer, before if before >= 0 and not self._layers[before].without_backward else -1)
        if layer.gathers_boundary:
            gradients = layer.scatter_boundary(gradients)
        for use in layer.parameter_uses:
            use.flat_parameter.ensure_gradients()
        gradients = layer.module.lay_out(gradients)
        if stored.output is None:
            # Buffers change back after the backward, whose autograd graph may refer to them.
            with self._recomputed[layer.number].repeating(stored.buffers):
                self._recompute(layer, stored).backward(gradients, loss_gradient)
        else:
            stored.output.backward(gradients, loss_gradient)
        for use in layer.parameter_uses:
            use.flat_parameter.accumulate_gradients(contributes=use.contributes)
        zeros = torch.zeros_like if layer.needs_input_gradients else _zeros
        input_gradients = tuple(tensor.grad if tensor.grad is not None else zeros(tensor) for tensor in stored.inputs)
        return layer.gather_boundary(input_gradients) if layer.scatters_boundary else input_gradients

    def _recompute(self, layer: RankLayer, stored: _StoredForward) -> Output:
        with torch.enable_grad(), self._recorder.action(Action.RECOMPUTE):
            return self._compute(layer, _seed(layer, stored.rows), stored.inputs, _fields(layer, stored.rows))

    def _compute(self, layer: RankLayer, seed: int, inputs: Boundary, fields: Data) -> Output:
        if layer.module.draws_random_numbers:
            seed_random_numbers(seed, self._recorder.device)
        output: Output = layer.module(inputs, fields)
        return output

    def _unshard_weights(self, layer: RankLayer, next_index: int) -> None:
        """Wait for the layer's weights, and start to gather those of the layer that computes next."""
        if not layer.has_sharded_weights:
            return
        with self._communication(Action.GATHER):
            for use in layer.parameter_uses:
                use.flat_parameter.unshard()
            if 0 <= next_index < len(self._layers):
                for use in self._layers[next_index].parameter_uses:
                    use.flat_parameter.start_unshard()

    @staticmethod
    def _reshard_weights(layer: RankLayer, *, is_last_pass: bool) -> None:
        if layer.run.run.strategy.keep_gathered_weights and not is_last_pass:
            return
        for use in layer.parameter_uses:
            use.flat_parameter.reshard()

    def _start_reductions(self, layer: RankLayer) -> None:
        if not layer.overlaps_reduction:
            return
        with self._communication(Action.GRADIENTS):
            reductions = tuple(
                use.reduction
                for use in layer.parameter_uses
                if use.reduction is not None and use.reduction.overlaps_backward
            )
            for before in self._last_reductions:
                if not before.flat_parameter.keeps_full_gradients:
                    before.wait()  # so that at most two layers' gradients are unsharded
            for reduction in reductions:
                reduction.start()
            self._last_reductions = reductions

    @contextmanager
    def _communication(self, action: Action) -> Iterator[None]:
        """Record an action that is not computation; emulated pacing pauses meanwhile."""
        self._pacer.pause()
        with self._recorder.action(action):
            yield
        self._pacer.resume()


def _zeros(tensor: Tensor) -> Tensor:
    """Return zeros of a tensor's shape and number format, in the memory of one."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _seed(layer: RankLayer, rows: MicroBatchRows) -> int:
    """Return the seed of the random numbers of a layer's forward."""
    return hash_seed(rows.seed, layer.number)


def _fields(layer: RankLayer, rows: MicroBatchRows) -> Data:
    return {field: rows.fields[field] for field in layer.module.reads}
