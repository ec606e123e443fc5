"""The intra-operator pass over what the plan document's degrees can say: one strategy for all layers of a stage.

Logical mesh shapes are the splits of the submesh into tensor × data; the options are weight-update sharding (ZeRO, which
the paper gets by rewriting all-reduces) and recomputation. Costs are those of the house's cost model, taken alone: what
several stages do to each other's links is left to the exact estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trainwright.cost import memory
from trainwright.cost.collectives import Collective
from trainwright.cost.compute import layer_seconds
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Sharding, even_rows
from trainwright.search.alpa.layer_spans import LayerSpans
from trainwright.search.alpa.mesh_devices import MeshDevices
from trainwright.search.alpa.options import Options, StageStrategy
from trainwright.search.alpa.submesh import Submesh
from trainwright.search.degrees import profiled, tensor_degrees
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array
from trainwright.search.stage_memory import StageMemory

SHARDINGS = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
"""Of stages with several data replicas. Sharding the update moves as many bytes as summing whole gradients does, and
needs less memory and time behind it, so NONE is not worth a look.
"""


class _Shape(NamedTuple):
    """A logical mesh shape, and the most rows of a micro-batch on one replica."""

    tensor: int
    data: int
    rows: int


class _Way(NamedTuple):
    shape: _Shape
    sharding: Sharding
    recompute: bool


class _Costs(NamedTuple):
    """[first, end] of one way; see Options."""

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array


class _Passes(NamedTuple):
    """By layer kind: seconds of a forward and a backward of one micro-batch, tensor all-reduces apart."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    forward_sync: Mapping[str, float]
    backward_sync: Mapping[str, float]


@dataclass
class DegreeOptions:
    """Tables of one problem; what submeshes share is computed once."""

    problem: Problem
    spans: LayerSpans
    devices: MeshDevices
    _held: dict[int, Array] = field(default_factory=dict)
    _known: dict[tuple[object, ...], Array] = field(default_factory=dict)

    @cached_property
    def _memory(self) -> StageMemory:
        return StageMemory(self.problem)

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> Options | None:
        """Every way that the limits, the profiles and the rows allow; None where there is none."""
        ways = self._ways(submesh, rows)
        if not ways:
            return None
        tables = _Tables(self, submesh, micro_batches)
        found = [tables.costs(way) for way in ways]

        def strategy(option: int, first: int, end: int) -> StageStrategy:
            return StageStrategy((_layer_run(ways[option], rows, *self.spans.bounds[[first, end]].tolist()),))

        seconds, iteration, state, activation = (np.stack(values) for values in zip(*found, strict=True))
        copies = np.array([float(way.shape.tensor) for way in ways])
        return Options(np.where(self.spans.is_stage, seconds, np.inf), iteration, state, activation, copies, strategy)

    def _ways(self, submesh: Submesh, rows: int) -> list[_Way]:
        problem, limits, size = self.problem, self.problem.limits, submesh.size
        found = []
        for tensor in tensor_degrees(problem.model, size, limits.max_tensor_degree):
            data = size // tensor
            if data > min(rows, limits.max_data_degree or rows):
                continue
            if profiled(problem.model, problem.profiles, submesh.accelerators, tensor):
                shape = _Shape(tensor, data, -(-rows // data))
                shardings = SHARDINGS if data > 1 else (Sharding.NONE,)
                found += [_Way(shape, sharding, recompute) for sharding in shardings for recompute in (False, True)]
        return found

    def held(self, tensor: int) -> Array:
        """[first, end] values that a device holds."""
        if tensor not in self._held:
            self._held[tensor] = self.spans.chosen(self._memory.held_parameters(tensor))
        return self._held[tensor]

    def boundary_bytes(self, rows: int) -> tuple[Array, Array]:
        """[first, end] of so many rows: bytes of the boundaries once, and for every micro-batch in flight."""
        sent = rows * self._memory.row_bytes
        outgoing = np.append(sent[:-1], 0.0)
        entering, leaving = sent[self.spans.bounds][:, None], outgoing[self.spans.bounds][None, :]
        return memory.RECEIVED_AHEAD * (entering + leaving), leaving + 0.0 * entering

    def loss_bytes(self, shape: _Shape) -> Array:
        """[first, end] of the last stage's workspace."""
        found = np.zeros_like(self.spans.is_stage, dtype=float)
        found[:, -1] = memory.loss_bytes(self.problem.setting, shape.tensor, shape.rows)
        return found

    def sums(self, key: tuple[object, ...], by_kind: Mapping[str, float]) -> Array:
        """Sums over spans, remembered by what they depend on."""
        if key not in self._known:
            self._known[key] = self.spans.sums(by_kind)
        return self._known[key]


@dataclass
class _Tables:
    """The tables of one submesh; what its ways share is computed once."""

    of: DegreeOptions
    submesh: Submesh
    micro_batches: int
    _passes: dict[_Shape, _Passes] = field(default_factory=dict)
    _activations: dict[tuple[_Shape, bool], tuple[Array, Array]] = field(default_factory=dict)

    def costs(self, way: _Way) -> _Costs:
        state, gathered = self._state_bytes(way)
        activations, once = self._activation_bytes(way.shape, recompute=way.recompute)
        seconds, room = self._seconds(way)
        iteration = self._iteration_seconds(way, room)
        return _Costs(seconds, iteration, state + gathered + once, activations)

    def _by_kind(self, shape: _Shape) -> _Passes:
        if shape not in self._passes:
            setting, collective = self.of.problem.setting, self._collectives(shape)[0]
            found = {
                kind.name: layer_seconds(
                    kind,
                    accelerators=self.submesh.accelerators,
                    tensor=shape.tensor,
                    rows=shape.rows,
                    recompute=False,
                    collective=collective,
                    setting=setting,
                )
                for kind in setting.model.kinds
            }
            self._passes[shape] = _Passes(
                {name: one.forward_seconds for name, one in found.items()},
                {name: one.backward_seconds for name, one in found.items()},
                {name: one.forward_sync_seconds for name, one in found.items()},
                {name: one.backward_sync_seconds for name, one in found.items()},
            )
        return self._passes[shape]

    def _collectives(self, shape: _Shape) -> tuple[Collective, Collective]:
        """The all-reduces of its tensor groups and of its data groups."""
        return self.of.devices.collectives(self.submesh, shape.tensor)

    def _seconds(self, way: _Way) -> tuple[Array, Array]:
        """[first, end] of one micro-batch, and the computation of its backward that sums of gradients may hide behind."""
        passes, spans = self._by_kind(way.shape), self.of.spans
        total: dict[str, float] = {}
        backward: dict[str, float] = {}
        for kind in self.of.problem.model.kinds:
            name = kind.name
            backward[name] = passes.backward[name] + way.recompute * passes.forward[name]
            sync = passes.backward_sync[name] + (1 + way.recompute) * passes.forward_sync[name]
            total[name] = passes.forward[name] + backward[name] + sync
        seconds, room = spans.sums(total), spans.sums(backward)
        if way.sharding is not Sharding.ZERO3:
            return seconds, room
        gather = {kind.name: self._gather_seconds(kind, way) for kind in self.of.problem.model.kinds}
        there, back = self._hidden_gathers(passes.forward, backward, gather)
        shown = (2 - self.of.problem.runtime.overlap_slowdown_ratio) * (there + back)
        return seconds + 2 * spans.sums(gather) - shown, np.maximum(room - back, 0.0)

    def _hidden_gathers(
        self, forward: Mapping[str, float], backward: Mapping[str, float], gather: Mapping[str, float]
    ) -> tuple[Array, Array]:
        """[first, end] seconds of gathers in a forward and in a backward that run while the layer before computes."""
        layers = self.of.problem.model.layers
        there = [min(forward[a], gather[b]) for a, b in pairwise(layers)]
        back = [min(backward[b], gather[a]) for a, b in pairwise(layers)]
        return self.of.spans.sums_of_pairs(np.array(there)), self.of.spans.sums_of_pairs(np.array(back))

    def _gather_seconds(self, kind: LayerKind, way: _Way) -> float:
        setting = self.of.problem.setting
        values = setting.values_at(kind, way.shape.tensor)
        return self._collectives(way.shape)[1].gather_seconds(values * setting.model.dtype.num_bytes)

    def _reduce_seconds(self, kind: LayerKind, way: _Way) -> float:
        setting = self.of.problem.setting
        values = setting.values_at(kind, way.shape.tensor)
        collective = self._collectives(way.shape)[1]
        return _halves(collective, way)[0] * collective.ring_seconds(values * setting.gradient_dtype.num_bytes)

    def _iteration_seconds(self, way: _Way, room: Array) -> Array:
        """[first, end] sums of gradients behind the last backward, the update, and weights gathered behind it.

        `room` is what sums that run beside the last backward may hide behind.
        """
        setting, shape = self.of.problem.setting, way.shape
        held = self.of.held(shape.tensor)
        parts = 1 if way.sharding is Sharding.NONE else shape.data
        update = {
            kind.name: max(
                setting.layer_cost(name, kind, shape.tensor, shape.rows).update_seconds
                for name in self.submesh.accelerators
            )
            for kind in setting.model.kinds
        }
        seconds = self.of.spans.sums(update) / parts
        if shape.data == 1:
            return seconds
        collective = self._collectives(shape)[1]
        there, back = _halves(collective, way)
        summed = there * _ring_seconds(collective, held * setting.gradient_dtype.num_bytes)
        if way.sharding in {Sharding.ZERO2, Sharding.ZERO3} or setting.runtime.overlaps_gradients:
            own = {kind.name: self._reduce_seconds(kind, way) for kind in setting.model.kinds}
            last = self.of.spans.of_first_layer(own)  # nothing computes behind it
            hidden = np.clip(summed - last, 0.0, room)
            summed = summed - hidden + (setting.runtime.overlap_slowdown_ratio - 1) * hidden
        if way.sharding is not Sharding.ZERO3:
            seconds = seconds + back * _ring_seconds(collective, held * setting.model.dtype.num_bytes)
        return seconds + summed

    def _state_bytes(self, way: _Way) -> tuple[Array, Array]:
        """[first, end] weights, gradients and optimizer state; and weights that are whole for a while."""
        setting, data = self.of.problem.setting, way.shape.data
        values = self.of.held(way.shape.tensor)
        part = values if way.sharding is Sharding.NONE else np.ceil(values / data)
        size, gradient = setting.model.dtype.num_bytes, setting.gradient_dtype.num_bytes
        sizes = {kind.name: float(setting.values_at(kind, way.shape.tensor)) for kind in setting.model.kinds}
        weights, gradients, gathered = values, values, np.zeros_like(values)
        if way.sharding in {Sharding.ZERO2, Sharding.ZERO3} and self.micro_batches == 1:
            gradients = np.minimum(values, part + self.of.spans.largest(sizes))
        if way.sharding is Sharding.ZERO3:
            weights, gathered = part, self.of.spans.largest_pair(sizes) * size
        optimizer = memory.optimizer_bytes(setting.model, setting.optimizer)
        return weights * size + gradients * gradient + part * optimizer, gathered

    def _activation_bytes(self, shape: _Shape, *, recompute: bool) -> tuple[Array, Array]:
        """[first, end] for every micro-batch in flight, and once."""
        key = (shape, recompute)
        if key not in self._activations:
            setting, spans = self.of.problem.setting, self.of.spans
            kinds = setting.model.kinds
            sizes = {
                kind.name: max(
                    setting.layer_cost(name, kind, shape.tensor, shape.rows).activation_bytes
                    for name in self.submesh.accelerators
                )
                for kind in kinds
            }
            once, kept = self.of.boundary_bytes(shape.rows)
            once = once + self.of.loss_bytes(shape) + setting.runtime.constant_bytes
            if recompute:
                model = setting.model
                inputs = [0, *(model.output_bytes_per_row(layer) for layer in range(len(model.layers) - 1))]
                kept = kept + spans.sums_of_layers(shape.rows * np.array(inputs, dtype=float))
                once = once + spans.largest(sizes)
            else:
                kept = kept + spans.sums(sizes)
            self._activations[key] = kept, once + 1.0  # the exact memory is rounded to whole bytes
        return self._activations[key]


def _halves(collective: Collective, way: _Way) -> tuple[float, float]:
    """What the sum of gradients and what the bringing back of weights take of a ring's all-reduce."""
    ratios = collective.ratios
    if way.sharding is Sharding.NONE:
        return ratios.all_reduce / 2, ratios.all_reduce / 2
    return ratios.reduce_scatter / 2, ratios.all_gather / 2


def _ring_seconds(collective: Collective, sizes: Array) -> Array:
    """Of all-reduces of so many bytes by undisturbed rings, each by the fastest way."""
    found: Array = np.min([way.latency_seconds + way.seconds_per_byte * sizes for way in collective.ways], axis=0)
    return np.where(sizes > 0, found, 0.0)


def _layer_run(way: _Way, rows: int, first: int, end: int) -> LayerRun:
    parts = even_rows(rows, way.shape.data)
    return LayerRun(
        first, end - first, way.shape.tensor, way.shape.data, parts, sharding=way.sharding, recompute=way.recompute
    )
