"""Intra-operator pass limited to the plan document's degrees: one strategy for all layers of a stage.

Logical mesh shapes are the splits of the submesh into tensor × data; options are ZeRO stages (weight-update sharding,
which the paper gets by rewriting all-reduces) and recomputation. Costs ignore contention between stages: the exact
replay adds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trainwright.cost import memory
from trainwright.cost.collectives import Collective
from trainwright.cost.layer_sums import Array
from trainwright.cost.layer_times import layer_seconds
from trainwright.cost.memory_terms import (
    InFlightBytes,
    activation_bytes,
    boundary_buffer_bytes,
    shard_values,
    state_bytes,
)
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Sharding, split_rows
from trainwright.search.alpa.layer_clusters import LayerSpans
from trainwright.search.alpa.stage_candidates import StageStrategy, SubmeshOptions
from trainwright.search.alpa.submeshes import RepresentativeDevices, Submesh
from trainwright.search.degrees import is_profiled, tensor_degrees
from trainwright.search.problem import Problem

SHARDINGS = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
"""ZeRO stages tried for several data replicas.

NONE is never better: sharding the update moves the same number of bytes as an all-reduce, and needs less memory and
less optimizer time.
"""


class _Shape(NamedTuple):
    """Logical mesh shape, and the most rows of a micro-batch on one replica."""

    tensor: int
    data: int
    rows: int


class _DegreeOption(NamedTuple):
    shape: _Shape
    sharding: Sharding
    recompute: bool


class _OptionCosts(NamedTuple):
    """Costs `[first, end]` of one option, as in `SubmeshOptions`."""

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array


class _PassSeconds(NamedTuple):
    """Forward and backward seconds of one micro-batch by layer kind, with tensor all-reduces (`sync`) separate."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    forward_sync: Mapping[str, float]
    backward_sync: Mapping[str, float]


@dataclass
class DegreeOptions:
    """Intra-operator pass by degrees for one problem, caching what submeshes share."""

    problem: Problem
    spans: LayerSpans
    devices: RepresentativeDevices
    _resident: dict[int, Array] = field(default_factory=dict)

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> SubmeshOptions | None:
        """Return every option that limits, profiles and rows allow, None if there is none."""
        ways = self._enumerate_options(submesh, rows)
        if not ways:
            return None
        tables = _SubmeshTables(self, submesh, micro_batches)
        found = [tables.costs(way) for way in ways]

        def strategy(option: int, first: int, end: int) -> StageStrategy:
            return StageStrategy((_layer_run(ways[option], rows, *self.spans.boundaries[[first, end]].tolist()),))

        seconds, iteration, state, activation = (np.stack(values) for values in zip(*found, strict=True))
        copies = np.array([float(way.shape.tensor) for way in ways])
        return SubmeshOptions(
            np.where(self.spans.is_stage, seconds, np.inf), iteration, state, activation, copies, strategy
        )

    def _enumerate_options(self, submesh: Submesh, rows: int) -> list[_DegreeOption]:
        problem, limits, size = self.problem, self.problem.limits, submesh.size
        found = []
        for tensor in tensor_degrees(problem.model, size, limits.max_tensor_degree):
            data = size // tensor
            if data > min(rows, limits.max_data_degree or rows):
                continue
            if is_profiled(problem.model, problem.profiles, submesh.accelerators, tensor):
                shape = _Shape(tensor, data, -(-rows // data))
                shardings = SHARDINGS if data > 1 else (Sharding.NONE,)
                found += [
                    _DegreeOption(shape, sharding, recompute) for sharding in shardings for recompute in (False, True)
                ]
        return found

    def resident_parameters(self, tensor: int) -> Array:
        """Return `[first, end]` the number of parameters on a device."""
        if tensor not in self._resident:
            self._resident[tensor] = self.spans.at_boundaries(self.problem.cost_context.resident_values(tensor))
        return self._resident[tensor]

    def loss_bytes(self, shape: _Shape) -> Array:
        """Return `[first, end]` workspace bytes of the loss, nonzero only for last stages."""
        found = np.zeros_like(self.spans.is_stage, dtype=float)
        found[:, -1] = memory.loss_bytes(self.problem.cost_context, shape.tensor, shape.rows)
        return found


@dataclass
class _SubmeshTables:
    """Cost tables of one submesh, caching what its options share."""

    degree_options: DegreeOptions
    submesh: Submesh
    micro_batches: int
    _passes: dict[_Shape, _PassSeconds] = field(default_factory=dict)
    _activations: dict[tuple[_Shape, bool], InFlightBytes[Array]] = field(default_factory=dict)

    def costs(self, way: _DegreeOption) -> _OptionCosts:
        state, gathered = self._state_bytes(way)
        activations = self._activation_bytes(way.shape, recompute=way.recompute)
        seconds, overlappable = self._seconds(way)
        iteration = self._iteration_seconds(way, overlappable)
        return _OptionCosts(seconds, iteration, state + gathered + activations.once, activations.per_micro_batch)

    def _pass_seconds(self, shape: _Shape) -> _PassSeconds:
        if shape not in self._passes:
            setting, collective = self.degree_options.problem.cost_context, self._collectives(shape)[0]
            found = {
                kind.name: layer_seconds(
                    kind,
                    accelerators=self.submesh.accelerators,
                    tensor=shape.tensor,
                    rows=shape.rows,
                    recompute=False,
                    collective=collective,
                    context=setting,
                )
                for kind in setting.model.kinds
            }
            self._passes[shape] = _PassSeconds(
                {name: one.forward_seconds for name, one in found.items()},
                {name: one.backward_seconds for name, one in found.items()},
                {name: one.forward_sync_seconds for name, one in found.items()},
                {name: one.backward_sync_seconds for name, one in found.items()},
            )
        return self._passes[shape]

    def _collectives(self, shape: _Shape) -> tuple[Collective, Collective]:
        """Return the all-reduces of the tensor groups and of the data groups."""
        return self.degree_options.devices.collectives(self.submesh, shape.tensor)

    def _seconds(self, way: _DegreeOption) -> tuple[Array, Array]:
        """Return `[first, end]` seconds of one micro-batch, and backward compute seconds that gradient reduction can overlap."""
        passes, spans = self._pass_seconds(way.shape), self.degree_options.spans
        total: dict[str, float] = {}
        backward: dict[str, float] = {}
        for kind in self.degree_options.problem.model.kinds:
            name = kind.name
            backward[name] = passes.backward[name] + way.recompute * passes.forward[name]
            sync = passes.backward_sync[name] + (1 + way.recompute) * passes.forward_sync[name]
            total[name] = passes.forward[name] + backward[name] + sync
        seconds, overlappable = spans.sums(total), spans.sums(backward)
        if way.sharding is not Sharding.ZERO3:
            return seconds, overlappable
        gather = {kind.name: self._gather_seconds(kind, way) for kind in self.degree_options.problem.model.kinds}
        forward_hidden, backward_hidden = self._hidden_gathers(passes.forward, backward, gather)
        shown = (2 - self.degree_options.problem.runtime.overlap_slowdown_ratio) * (forward_hidden + backward_hidden)
        return seconds + 2 * spans.sums(gather) - shown, np.maximum(overlappable - backward_hidden, 0.0)

    def _hidden_gathers(
        self, forward: Mapping[str, float], backward: Mapping[str, float], gather: Mapping[str, float]
    ) -> tuple[Array, Array]:
        """Return `[first, end]` seconds of forward and of backward all-gathers that overlap the neighbouring layer's compute."""
        layers = self.degree_options.problem.model.layers
        forward_hidden = [min(forward[a], gather[b]) for a, b in pairwise(layers)]
        backward_hidden = [min(backward[b], gather[a]) for a, b in pairwise(layers)]
        return self.degree_options.spans.sums_of_pairs(
            np.array(forward_hidden)
        ), self.degree_options.spans.sums_of_pairs(np.array(backward_hidden))

    def _gather_seconds(self, kind: LayerKind, way: _DegreeOption) -> float:
        setting = self.degree_options.problem.cost_context
        values = setting.parameters_per_rank(kind, way.shape.tensor)
        return self._collectives(way.shape)[1].all_gather_seconds(values * setting.model.dtype.num_bytes)

    def _reduce_seconds(self, kind: LayerKind, way: _DegreeOption) -> float:
        setting = self.degree_options.problem.cost_context
        values = setting.parameters_per_rank(kind, way.shape.tensor)
        collective = self._collectives(way.shape)[1]
        return _reduce_and_gather_ratios(collective, way)[0] * collective.ideal_ring_seconds(
            values * setting.gradient_dtype.num_bytes
        )

    def _iteration_seconds(self, way: _DegreeOption, overlappable: Array) -> Array:
        """Return `[first, end]` exposed gradient reduction, optimizer step and all-gather of updated weights.

        `overlappable`: backward compute seconds of the last micro-batch that gradient reduction can overlap.
        """
        setting, shape = self.degree_options.problem.cost_context, way.shape
        resident = self.degree_options.resident_parameters(shape.tensor)
        parts = 1 if way.sharding is Sharding.NONE else shape.data
        update = {
            kind.name: max(
                setting.layer_cost(name, kind, shape.tensor, shape.rows).update_seconds
                for name in self.submesh.accelerators
            )
            for kind in setting.model.kinds
        }
        seconds = self.degree_options.spans.sums(update) / parts
        if shape.data == 1:
            return seconds
        collective = self._collectives(shape)[1]
        there, back = _reduce_and_gather_ratios(collective, way)
        summed = there * _all_reduce_seconds(collective, resident * setting.gradient_dtype.num_bytes)
        if way.sharding in {Sharding.ZERO2, Sharding.ZERO3} or setting.runtime.overlaps_gradients:
            own = {kind.name: self._reduce_seconds(kind, way) for kind in setting.model.kinds}
            last = self.degree_options.spans.first_layer_values(
                own
            )  # the first layer's gradients come last and overlap nothing
            hidden = np.clip(summed - last, 0.0, overlappable)
            summed = summed - hidden + (setting.runtime.overlap_slowdown_ratio - 1) * hidden
        if way.sharding is not Sharding.ZERO3:
            seconds = seconds + back * _all_reduce_seconds(collective, resident * setting.model.dtype.num_bytes)
        return seconds + summed

    def _state_bytes(self, way: _DegreeOption) -> tuple[Array, Array]:
        """Return `[first, end]` bytes of weights, gradients and optimizer state, and of weights that are gathered for use."""
        setting, data = self.degree_options.problem.cost_context, way.shape.data
        values = self.degree_options.resident_parameters(way.shape.tensor)
        sizes = {kind.name: float(setting.parameters_per_rank(kind, way.shape.tensor)) for kind in setting.model.kinds}
        accumulates, spans = self.micro_batches > 1, self.degree_options.spans
        state = state_bytes(
            values,
            shard_values(values, data),
            way.sharding,
            setting.value_bytes,
            accumulates=accumulates,
            largest_layer=0 if accumulates else spans.largest(sizes),
        )
        gathered = np.zeros_like(values)
        if way.sharding is Sharding.ZERO3:
            gathered = spans.largest_pair(sizes) * setting.model.dtype.num_bytes
        return state.total, gathered

    def _activation_bytes(self, shape: _Shape, *, recompute: bool) -> InFlightBytes[Array]:
        """Return `[first, end]` bytes of activations, boundaries and the runtime."""
        key = (shape, recompute)
        if key not in self._activations:
            setting, spans = self.degree_options.problem.cost_context, self.degree_options.spans
            kinds = setting.model.kinds
            sizes = {
                kind.name: max(
                    setting.layer_cost(name, kind, shape.tensor, shape.rows).activation_bytes
                    for name in self.submesh.accelerators
                )
                for kind in kinds
            }
            inputs = shape.rows * np.array(setting.row_bytes[:-1], dtype=np.float64)
            saved = activation_bytes(
                spans.sums(sizes), spans.sums_of_layers(inputs), spans.largest(sizes), recompute=recompute
            )
            sent = shape.rows * np.array(setting.row_bytes, dtype=np.float64)[spans.boundaries]
            buffers = boundary_buffer_bytes(sent[:, None], sent[None, :])
            once = buffers.once + self.degree_options.loss_bytes(shape) + setting.runtime.constant_bytes + saved.once
            self._activations[key] = InFlightBytes(
                buffers.per_micro_batch + saved.per_micro_batch,
                once + 1.0,  # exact memory is rounded up to whole bytes
            )
        return self._activations[key]


def _reduce_and_gather_ratios(collective: Collective, way: _DegreeOption) -> tuple[float, float]:
    """Return the fractions of an all-reduce that gradient reduction and the all-gather of weights take."""
    ratios = collective.ratios
    if way.sharding is Sharding.NONE:
        return ratios.all_reduce / 2, ratios.all_reduce / 2
    return ratios.reduce_scatter / 2, ratios.all_gather / 2


def _all_reduce_seconds(collective: Collective, sizes: Array) -> Array:
    """Return seconds of all-reduces of `sizes` bytes without contention, each by its fastest algorithm."""
    found: Array = np.min([way.latency_seconds + way.seconds_per_byte * sizes for way in collective.algorithms], axis=0)
    return np.where(sizes > 0, found, 0.0)


def _layer_run(way: _DegreeOption, rows: int, first: int, end: int) -> LayerRun:
    parts = split_rows(rows, way.shape.data)
    return LayerRun(
        first, end - first, way.shape.tensor, way.shape.data, parts, sharding=way.sharding, recompute=way.recompute
    )
