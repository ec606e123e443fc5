"""Intra-operator pass limited to the plan document's degrees: one strategy for all layers of a stage.

Logical mesh shapes are the splits of the submesh into tensor × data; options are ZeRO stages (weight-update sharding,
which the paper gets by rewriting all-reduces) and recomputation. Costs ignore contention between stages: the exact
replay adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trainwright.cost import memory
from trainwright.cost.collectives import Collective
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import (
    InFlightBytes,
    activation_bytes,
    boundary_buffer_bytes,
    shard_values,
    state_bytes,
)
from trainwright.cost.time_terms import (
    DataRing,
    LayerTerms,
    TensorGroupClass,
    kind_table,
    overlapped_seconds,
    tail_seconds,
    with_recompute,
)
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, split_rows
from trainwright.search.alpa.layer_clusters import LayerSpans
from trainwright.search.alpa.stage_candidates import StageStrategy, SubmeshOptions
from trainwright.search.alpa.submeshes import RepresentativeDevices, Submesh
from trainwright.search.degrees import is_profiled, tensor_degrees
from trainwright.search.problem import Problem
from trainwright.strategy import Sharding, Strategy

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
        is_split = self.problem.runtime.splits_boundaries
        copies = np.array([1.0 if is_split else float(way.shape.tensor) for way in ways])
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
    _kind_tables: dict[_Shape, LayerTerms[Array]] = field(default_factory=dict)
    _activations: dict[tuple[_Shape, bool], InFlightBytes[Array]] = field(default_factory=dict)

    def costs(self, way: _DegreeOption) -> _OptionCosts:
        state, gathered = self._state_bytes(way)
        activations = self._activation_bytes(way.shape, recompute=way.recompute)
        seconds, overlappable = self._seconds(way)
        iteration = self._iteration_seconds(way, overlappable)
        return _OptionCosts(seconds, iteration, state + gathered + activations.once, activations.per_micro_batch)

    def _kind_table(self, shape: _Shape) -> LayerTerms[Array]:
        if shape not in self._kind_tables:
            group = TensorGroupClass(self.submesh.accelerators, shape.tensor, self._collectives(shape)[0])
            self._kind_tables[shape] = kind_table(group, shape.rows, self.degree_options.problem.cost_context)
        return self._kind_tables[shape]

    def _by_layer(self, by_kind: Array | Sequence[float]) -> Array:
        found: Array = np.asarray(by_kind, dtype=np.float64)[self.degree_options.problem.cost_context.kind_numbers]
        return found

    def _collectives(self, shape: _Shape) -> tuple[Collective, Collective]:
        """Return the all-reduces of the tensor groups and of the data groups."""
        return self.degree_options.devices.collectives(self.submesh, shape.tensor)

    def _seconds(self, way: _DegreeOption) -> tuple[Array, Array]:
        """Return `[first, end]` seconds of one micro-batch, and backward compute seconds that gradient reduction can overlap."""
        table, spans = self._kind_table(way.shape), self.degree_options.spans
        if way.recompute:
            table = with_recompute(table)
        forward, backward = self._by_layer(table.forward_seconds), self._by_layer(table.backward_seconds)
        seconds = spans.sums(self._by_layer(table.forward_pass_seconds + table.backward_pass_seconds))
        overlappable = spans.sums(backward)
        if way.sharding is not Sharding.ZERO3:
            return seconds, overlappable
        gather = self._by_layer([self._gather_seconds(one, way) for one in self.degree_options.problem.model.kinds])
        # An all-gather overlaps the compute of the layer before it in the forward, and of the one after it in the backward.
        forward_hidden = spans.sums_of_pairs(np.minimum(forward[:-1], gather[1:]))
        backward_hidden = spans.sums_of_pairs(np.minimum(backward[1:], gather[:-1]))
        seconds = overlapped_seconds(
            2 * spans.sums(gather),
            forward_hidden + backward_hidden,
            self.degree_options.problem.runtime.overlap_slowdown_ratio,
            seconds,
        )
        return seconds, np.maximum(overlappable - backward_hidden, 0.0)

    def _gather_seconds(self, kind: LayerKind, way: _DegreeOption) -> float:
        context = self.degree_options.problem.cost_context
        values = context.parameters_per_rank(kind, way.shape.tensor)
        return self._collectives(way.shape)[1].all_gather_seconds(values * context.model.dtype.num_bytes)

    def _reduce_seconds(self, kind: LayerKind, way: _DegreeOption) -> float:
        context = self.degree_options.problem.cost_context
        values = context.parameters_per_rank(kind, way.shape.tensor)
        return self._collectives(way.shape)[1].reduce_scatter_seconds(values * context.gradient_dtype.num_bytes)

    def _iteration_seconds(self, way: _DegreeOption, overlappable: Array) -> Array:
        """Return `[first, end]` exposed gradient reduction, optimizer step and all-gather of updated weights.

        `overlappable`: backward compute seconds of the last micro-batch that gradient reduction can overlap.
        """
        context, shape, spans = self.degree_options.problem.cost_context, way.shape, self.degree_options.spans
        overlaps = way.sharding in {Sharding.ZERO2, Sharding.ZERO3} or context.runtime.overlaps_gradients
        reductions = self._by_layer([self._reduce_seconds(kind, way) for kind in context.model.kinds])
        return tail_seconds(
            self.degree_options.resident_parameters(shape.tensor),
            spans.sums(self._by_layer(self._kind_table(shape).update_seconds)),
            DataRing.of(self._collectives(shape)[1]),
            way.sharding,
            data=shape.data,
            window=overlappable if overlaps else 0.0,
            last_reduce_seconds=spans.first_layer_values(reductions),
            context=context,
        )

    def _state_bytes(self, way: _DegreeOption) -> tuple[Array, Array]:
        """Return `[first, end]` bytes of weights, gradients and optimizer state, and of weights that are gathered for use."""
        context, data = self.degree_options.problem.cost_context, way.shape.data
        values = self.degree_options.resident_parameters(way.shape.tensor)
        sizes = np.array([context.parameters_per_rank(kind, way.shape.tensor) for kind in context.model.kinds], float)
        accumulates, spans = context.keeps_whole_gradients(self.micro_batches), self.degree_options.spans
        state = state_bytes(
            values,
            shard_values(values, data),
            way.sharding,
            context.value_bytes,
            accumulates=accumulates,
            largest_layer=0 if accumulates else spans.largest(sizes),
        )
        gathered = np.zeros_like(values)
        if way.sharding is Sharding.ZERO3:
            gathered = spans.largest_pair(sizes) * context.model.dtype.num_bytes
        return state.total, gathered

    def _activation_bytes(self, shape: _Shape, *, recompute: bool) -> InFlightBytes[Array]:
        """Return `[first, end]` bytes of activations, boundaries and the runtime."""
        key = (shape, recompute)
        if key not in self._activations:
            context, spans = self.degree_options.problem.cost_context, self.degree_options.spans
            sizes = self._kind_table(shape).activation_bytes
            inputs = shape.rows * context.divided_activations.chosen_input_row_bytes(shape.tensor)
            saved = activation_bytes(
                spans.sums(self._by_layer(sizes)), spans.sums(inputs), spans.largest(sizes), recompute=recompute
            )
            sent = shape.rows * np.array(context.row_bytes, dtype=np.float64)[spans.boundaries]
            buffers = boundary_buffer_bytes(sent[:, None], sent[None, :])
            constant = context.runtime.constant_bytes_of(*self.submesh.accelerators)
            once = buffers.once + self.degree_options.loss_bytes(shape) + constant + saved.once
            self._activations[key] = InFlightBytes(
                buffers.per_micro_batch + saved.per_micro_batch,
                once + 1.0,  # exact memory is rounded up to whole bytes
            )
        return self._activations[key]


def _layer_run(way: _DegreeOption, rows: int, first: int, end: int) -> LayerRun:
    parts = split_rows(rows, way.shape.data)
    return LayerRun(
        first,
        end - first,
        Strategy(way.shape.tensor, way.shape.data, sharding=way.sharding, recompute=way.recompute),
        parts,
    )
