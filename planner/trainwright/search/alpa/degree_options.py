"""Intra-operator pass limited to the plan document's degrees: one strategy for all layers of a stage.

Logical mesh shapes are the splits of the submesh into tensor × data; options are ZeRO stages (weight-update sharding,
which the paper gets by rewriting all-reduces) and recomputation. Costs ignore contention between stages: the exact
replay adds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import InFlightBytes, activation_bytes, frozen_bytes, shard_values, state_bytes
from trainwright.cost.messages import gather_messages, message_count
from trainwright.cost.stage_tables import StageSpans, StageTables, hidden_by_next, hidden_by_previous
from trainwright.cost.time_terms import (
    DataRing,
    LayerTerms,
    TensorGroupClass,
    kind_table,
    overlapped_seconds,
    tail_seconds,
    with_recompute,
)
from trainwright.plan import LayerRun, split_rows
from trainwright.search.alpa.stage_candidates import StageStrategy, SubmeshOptions
from trainwright.search.alpa.submeshes import RepresentativeDevices, Submesh
from trainwright.search.degrees import open_strategies
from trainwright.search.problem import Problem
from trainwright.strategy import Sharding, Strategy

SHARDINGS = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
"""ZeRO stages tried for several data replicas.

NONE is never better: sharding the update moves the same number of bytes as an all-reduce, and needs less memory and
less optimizer time.
"""


class _OptionCosts(NamedTuple):
    """Costs `[span]` of one option, as in `SubmeshOptions`."""

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array


@dataclass
class DegreeOptions:
    """Intra-operator pass by degrees for one problem, caching what submeshes share."""

    problem: Problem
    spans: StageSpans
    devices: RepresentativeDevices

    @cached_property
    def stages(self) -> StageTables:
        return StageTables(self.problem.cost_context, self.spans)

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> SubmeshOptions | None:
        """Return every option that limits, profiles and rows allow, None if there is none."""
        strategies = self._strategies(submesh, rows)
        if not strategies:
            return None
        meshes = {each.tensor: self._mesh(submesh, each.tensor, rows, micro_batches) for each in strategies}
        mesh_costs = [meshes[each.tensor].costs(each) for each in strategies]

        def strategy(option: int, first: int, end: int) -> StageStrategy:
            start, stop = self.spans.cuts[first], self.spans.cuts[end]
            chosen = strategies[option]
            return StageStrategy((LayerRun(start, stop - start, chosen, split_rows(rows, chosen.data)),))

        seconds, iteration, state, activation = (np.stack(values) for values in zip(*mesh_costs, strict=True))
        is_split = self.problem.runtime.splits_boundaries
        copies = np.array([1.0 if is_split else float(each.tensor) for each in strategies])
        return SubmeshOptions(
            self.spans.grid(seconds, np.inf),
            self.spans.grid(iteration, 0.0),
            self.spans.grid(state, 0.0),
            self.spans.grid(activation, 0.0),
            copies,
            strategy,
        )

    def _mesh(self, submesh: Submesh, tensor: int, rows: int, micro_batches: int) -> _MeshCosts:
        within, across = self.devices.collectives(submesh, tensor)
        group, data = TensorGroupClass(submesh.accelerators, tensor, within), submesh.size // tensor
        return _MeshCosts(self.stages, group, DataRing.of(across), -(-rows // data), micro_batches)

    def _strategies(self, submesh: Submesh, rows: int) -> list[Strategy]:
        return [
            strategy.replace(sharding=sharding, recompute=recompute)
            for strategy in open_strategies(self.problem, submesh.size, submesh.accelerators)
            if strategy.data <= rows
            for sharding in (SHARDINGS if strategy.data > 1 else (Sharding.NONE,))
            for recompute in (False, True)
        ]


@dataclass
class _MeshCosts:
    """Costs of all stages on one logical mesh shape, `[span]`.

    Attributes:
        group, data_ring: tensor groups, and rings of the data groups.
        rows: most rows of a micro-batch on one replica.
    """

    stages: StageTables
    group: TensorGroupClass
    data_ring: DataRing
    rows: int
    micro_batches: int

    def costs(self, strategy: Strategy) -> _OptionCosts:
        """Return the costs of one option of this shape."""
        state, gathered = self._state_bytes(strategy)
        activations = self._activation_bytes[strategy.recompute]
        seconds, overlappable = self._seconds(strategy)
        iteration = self._iteration_seconds(strategy, overlappable)
        return _OptionCosts(seconds, iteration, state + gathered + activations.once, activations.per_micro_batch)

    @property
    def _context(self) -> CostContext:
        return self.stages.context

    @property
    def _spans(self) -> StageSpans:
        return self.stages.spans

    def _by_layer(self, by_kind: Array) -> Array:
        by_layer: Array = by_kind[self._context.kind_numbers]
        return by_layer

    @cached_property
    def _terms(self) -> LayerTerms[Array]:
        """`[kind]` terms without recompute."""
        return kind_table(self.group, self.rows, self._context)

    @cached_property
    def _parameters(self) -> Array:
        """`[kind]` parameters of one layer on one rank."""
        return self._context.divided_at(self.group.tensor).parameters_by_kind

    @cached_property
    def _trained(self) -> Array:
        """`[kind]` trained parameters of one layer on one rank."""
        return self._context.divided_at(self.group.tensor).trained_by_kind

    @cached_property
    def _resident_values(self) -> Array:
        return self.stages.resident_values(self.group.tensor)

    def _seconds(self, strategy: Strategy) -> tuple[Array, Array]:
        """Return seconds of one micro-batch, and backward compute seconds that gradient reduction can overlap."""
        terms, spans = with_recompute(self._terms) if strategy.recompute else self._terms, self._spans
        forward, backward = self._by_layer(terms.forward_seconds), self._by_layer(terms.backward_seconds)
        seconds = spans.sums(self._by_layer(terms.forward_pass_seconds + terms.backward_pass_seconds))
        overlappable = spans.sums(backward)
        if strategy.sharding is not Sharding.ZERO3:
            return seconds, overlappable
        gather = self._by_layer(
            self.data_ring.all_gather_seconds(
                self._parameters * self._context.model.dtype.num_bytes,
                np.array([gather_messages(kind, self._context.runtime) for kind in self._context.model.kinds]),
            )
        )
        forward_hidden = spans.sums(hidden_by_previous(gather, forward), without_first=True)
        backward_hidden = spans.sums(hidden_by_next(gather, backward), without_last=True)
        seconds = overlapped_seconds(
            2 * spans.sums(gather),
            forward_hidden + backward_hidden,
            self._context.runtime.overlap_slowdown_ratio,
            seconds,
        )
        return seconds, np.maximum(overlappable - backward_hidden, 0.0)

    def _iteration_seconds(self, strategy: Strategy, overlappable: Array) -> Array:
        """Return exposed gradient reduction, optimizer step and all-gather of updated weights."""
        num_bytes = self._trained * self._context.gradient_dtype.num_bytes
        tensors = np.array([float(kind.weight_tensors) for kind in self._context.model.kinds])
        messages = message_count(num_bytes, tensors, self._context.runtime)
        reductions = self.data_ring.reduce_scatter_seconds(num_bytes, messages)
        return tail_seconds(
            self._resident_values,
            self._spans.sums(self._by_layer(self._terms.update_seconds)),
            self.data_ring,
            strategy.sharding,
            data=strategy.data,
            backward_seconds=overlappable,
            last_reduce_seconds=self._by_layer(reductions)[self._spans.layers[0]],
            context=self._context,
        )

    def _state_bytes(self, strategy: Strategy) -> tuple[Array, Array | float]:
        """Return bytes of weights, gradients and optimizer state, and of weights that are gathered for use."""
        context = self._context
        accumulates = context.keeps_whole_gradients(self.micro_batches)
        state = state_bytes(
            self._resident_values,
            shard_values(self._resident_values, strategy.data),
            strategy.sharding,
            context.value_bytes,
            accumulates=accumulates,
            largest_layer=0 if accumulates else self._spans.largest(self._trained),
        )
        frozen = frozen_bytes(self.stages.frozen_values, strategy.sharding, strategy.data, context.value_bytes)
        if strategy.sharding is not Sharding.ZERO3:
            return state.total + frozen, 0.0
        return state.total + frozen, self._spans.largest_pair(self._parameters) * context.value_bytes.weight

    @cached_property
    def _activation_bytes(self) -> tuple[InFlightBytes[Array], ...]:
        """Bytes of activations, boundaries, the workspace and the runtime, without and with recompute."""
        tensor, stored = self.group.tensor, self._terms.activation_bytes
        buffers = self.stages.boundary_row_bytes
        constant = self._context.runtime.constant_bytes_of(*self.group.accelerators)
        once = self.rows * buffers.once + self.stages.workspace_bytes(tensor, self.rows) + constant
        return tuple(
            InFlightBytes(
                self.rows * buffers.per_micro_batch + saved.per_micro_batch,
                once + saved.once + 1.0,  # exact memory is rounded up to whole bytes
            )
            for saved in (
                activation_bytes(
                    self._spans.sums(self._by_layer(stored)),
                    self.stages.recomputed_bytes(tensor, self.rows),
                    self._spans.largest(stored + self.stages.snapshot_bytes),
                    recompute=recompute,
                )
                for recompute in (False, True)
            )
        )
