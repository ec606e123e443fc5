"""Forwards and backwards of one rank's layers, one layer after another.

Each layer has an autograd graph of its own: what lies between two layers is detached. So weights can be collected
before a layer and let go behind it, rows can move between two layers, a layer can be computed again in place of being
kept, and gradients can leave as soon as a layer is done, all without hooks into autograd.

Before the first of some sequence-parallel layers a boundary is parted, behind the last it is collected; a gradient on
its way back the other way round. Outside of them boundaries and gradients are whole on every rank of a tensor group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trainwright.timeline import Action
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.groups import Groups
from trainwright_worker.executor.mesh import rearrangement
from trainwright_worker.executor.messages import Mover
from trainwright_worker.executor.pace import moves
from trainwright_worker.executor.reduction import Reduction
from trainwright_worker.executor.stage import RankLayer, RankStage
from trainwright_worker.executor.timeline import Recorder
from trainwright_worker.layers.layer import Boundary, Data, Output


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a forward leaves for its backward; the output is computed again where there is none."""

    inputs: Boundary
    data: Data
    output: Output | None


class Passes:
    """The passes of a rank's stage.

    Attributes:
        loss: of this rank's rows so far, summed; zeros where another rank of the tensor group counts them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (each is a different part of the executor)
        self,
        stage: RankStage,
        rank: int,
        groups: Groups,
        pacer: Pacer,
        recorder: Recorder,
        beat: Callable[[str], None],
    ) -> None:
        self._stage, self._rank, self._pacer, self._recorder, self._beat = stage, rank, pacer, recorder, beat
        self._layers = stage.layers
        self._place = {layer.number: place for place, layer in enumerate(self._layers)}
        self._kept: dict[int, list[_Kept]] = {}
        self._started: Reduction | None = None
        self.loss = torch.zeros((), device=recorder.device)
        self._ahead: dict[int, Mover] = {}
        self._back: dict[int, Mover] = {}
        for place in range(1, len(stage.runs)):
            if moves(stage, place):
                old, new = stage.runs[place - 1][0].run, stage.runs[place][0].run
                rows = {"old": old.rows_of(rank), "new": new.rows_of(rank)}
                self._ahead[place] = Mover(groups.inside, rearrangement(old, new), rank=rank, **rows)
                self._back[place] = Mover(
                    groups.inside, rearrangement(new, old), rank=rank, old=rows["new"], new=rows["old"]
                )

    def clear_loss(self) -> None:
        self.loss.zero_()

    def forward(self, micro_batch: int, boundary: Boundary, data: Sequence[Data]) -> Boundary:
        """The boundary behind the stage; `data` are the batch's fields for the rows of each run."""
        kept: list[_Kept] = []
        for place, run in enumerate(self._stage.runs):
            if place in self._ahead:
                with self._communication(Action.MOVE):
                    boundary = self._ahead[place].move(boundary)
            for layer in run:
                self._beat(f"forward {micro_batch}, layer {layer.number}")
                boundary = self._forward_layer(layer, boundary, data[place], kept)
        self._kept[micro_batch] = kept
        return boundary

    def _forward_layer(self, layer: RankLayer, boundary: Boundary, data: Data, kept: list[_Kept]) -> Boundary:
        self._make_whole(layer, self._place[layer.number] + 1)
        if layer.parts_boundary:
            boundary = layer.own_part(boundary)
        inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in boundary)
        fields = {field: data[field] for field in layer.module.reads}
        with torch.set_grad_enabled(not layer.recomputes):
            output: Output = layer.module(inputs, fields)
        if output.loss is not None and layer.run.position(self._rank).tensor == 0:
            self.loss += output.loss.detach()
        kept.append(_Kept(inputs, fields, None if layer.recomputes else output))
        self._free(layer)
        return layer.collected(output.boundary) if layer.collects_boundary else output.boundary

    def backward(self, micro_batch: int, gradients: Boundary, loss_gradient: float, *, is_last: bool) -> Boundary:
        """The gradients for the stage before; `is_last` says that no further backward adds to the weights' gradients."""
        kept = self._kept.pop(micro_batch)
        for place in reversed(range(len(self._stage.runs))):
            for layer in reversed(self._stage.runs[place]):
                self._beat(f"backward {micro_batch}, layer {layer.number}")
                gradients = self._backward_layer(layer, kept.pop(), gradients, loss_gradient)
                if is_last:
                    self._start_reductions(layer)
            if place in self._back:
                with self._communication(Action.MOVE):
                    gradients = self._back[place].move(gradients)
        return gradients

    def _backward_layer(self, layer: RankLayer, kept: _Kept, gradients: Boundary, loss_gradient: float) -> Boundary:
        self._make_whole(layer, self._place[layer.number] - 1)
        if layer.collects_boundary:
            gradients = layer.own_part(gradients)
        output = kept.output
        if output is None:
            with torch.enable_grad(), self._recorder.action(Action.RECOMPUTE):
                output = layer.module(kept.inputs, kept.data)
        for held in layer.held:
            held.unit.expect()
        output.backward(gradients, loss_gradient)
        for held in layer.held:
            held.unit.collect(contributes=held.contributes)
        self._free(layer)
        found = tuple(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in kept.inputs)
        return layer.collected(found) if layer.parts_boundary else found

    def _make_whole(self, layer: RankLayer, neighbour: int) -> None:
        """Collect the layer's weights, and begin to collect those of the layer that computes next."""
        if not layer.gathers:
            return
        with self._communication(Action.GATHER):
            for held in layer.held:
                held.unit.wait()
            if 0 <= neighbour < len(self._layers):
                for held in self._layers[neighbour].held:
                    held.unit.gather()

    @staticmethod
    def _free(layer: RankLayer) -> None:
        for held in layer.held:
            held.unit.free()

    def _start_reductions(self, layer: RankLayer) -> None:
        if not layer.reduces_beside_backward:
            return
        with self._communication(Action.GRADIENTS):
            for held in layer.held:
                if held.reduction is not None and held.reduction.is_beside_backward:
                    if self._started is not None:
                        self._started.settle()
                    held.reduction.start()
                    self._started = held.reduction

    def settle(self) -> None:
        """Until the sums that were started beside the last backward are done."""
        if self._started is not None:
            self._started.settle()
            self._started = None

    @contextmanager
    def _communication(self, action: Action) -> Iterator[None]:
        """Time that is not computation: an emulated device's pace stands still."""
        self._pacer.interrupt()
        with self._recorder.action(action):
            yield
        self._pacer.resume()
