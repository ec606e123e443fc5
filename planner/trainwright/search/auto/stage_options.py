"""Stage options over all layer spans, as arrays."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array, Spans, prefix_sums, span_sums
from trainwright.cost.memory_terms import activation_bytes, state_bytes
from trainwright.cost.stage_tables import StageTables, hidden_by_next, hidden_by_previous
from trainwright.cost.time_terms import DataRing, TensorGroupClass, overlapped_seconds, tail_seconds
from trainwright.search.auto.replica_sets import ReplicaSet, StageOption, sharding_choices
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.strategy import Sharding


@dataclass(frozen=True, eq=False)
class StageCosts:
    """`[sharding, option, span]` micro-batch seconds, infinite where it does not fit, and recompute ratios."""

    seconds: Array
    recompute_ratio: Array


@dataclass(frozen=True, eq=False)
class _OptionCells:
    """Cells of all options in flat order; equal (cell, rows) pairs share a kind.

    Attributes:
        option_numbers: [member] option of the member.
        first_members: [option] its first member.
        kind_numbers: [member] its (cell, rows) kind.
        rows: [kind] rows per micro-batch.
        device_bytes: [kind] memory of the smallest device, without the runtime's constant part.
        largest_layer_bytes: [kind] stored bytes of the largest layer.
        workspace_bytes: [kind, span] bytes of the loss, and of the layer that takes the most.
        input_bytes: [kind, span] bytes that recompute stores.
        prefix_sums: [forward | backward | update seconds | stored bytes, kind, cut]; see `ReplicaTables.prefix_sums`.
    """

    option_numbers: NDArray[np.intp]
    first_members: NDArray[np.intp]
    kind_numbers: NDArray[np.intp]
    rows: Array
    device_bytes: Array
    largest_layer_bytes: Array
    workspace_bytes: Array
    input_bytes: Array
    prefix_sums: Array


@dataclass(frozen=True, eq=False)
class StageOptions:
    """Costs of many options; spans are cut pairs first < end in `np.triu_indices` order.

    Attributes:
        replica_sets: distinct sets; those with more cells than rows give no option.
        rows: rows per micro-batch.
    """

    replica_tables: ReplicaTables
    replica_sets: Collection[ReplicaSet]
    rows: int
    micro_batches: int
    _costs: dict[int, StageCosts] = field(default_factory=dict)

    @cached_property
    def option_numbers(self) -> dict[ReplicaSet, int]:
        """Return each replica set's option number."""
        return {option.replica_set: number for number, option in enumerate(self.options)}

    @cached_property
    def options(self) -> list[StageOption]:
        splits = (
            (replica_set, self.replica_tables.row_splits(replica_set.counts, self.rows))
            for replica_set in self.replica_sets
        )
        return [StageOption(replica_set, split) for replica_set, split in splits if split is not None]

    @property
    def _stage_tables(self) -> StageTables:
        return self.replica_tables.stage_tables

    @property
    def spans(self) -> Spans:
        return self._stage_tables.spans.pairs

    @cached_property
    def _option_cells(self) -> _OptionCells:
        replica_tables, stages = self.replica_tables, self._stage_tables
        kind_of: dict[tuple[TensorGroupClass, int], int] = {}
        option: list[int] = []
        kind: list[int] = []
        for number, stage_option in enumerate(self.options):
            for cell, share in stage_option.row_splits.items():
                option.append(number)
                kind.append(kind_of.setdefault((cell, share.largest), len(kind_of)))
        return _OptionCells(
            option_numbers=np.array(option),
            first_members=np.searchsorted(option, np.arange(len(self.options))),
            kind_numbers=np.array(kind),
            rows=np.array([float(rows) for _, rows in kind_of]),
            device_bytes=np.array(
                [float(min(replica_tables.device_bytes[name] for name in cell.accelerators)) for cell, _ in kind_of]
            ),
            largest_layer_bytes=replica_tables.largest_stored_bytes(list(kind_of)),
            workspace_bytes=np.stack([stages.workspace_bytes(cell.tensor, rows) for cell, rows in kind_of]),
            input_bytes=np.stack([stages.recomputed_bytes(cell.tensor, rows) for cell, rows in kind_of]),
            prefix_sums=replica_tables.prefix_sums(list(kind_of)),
        )

    def _slowest(self, totals: Array) -> Array:
        """Return [option, span] values of the slowest cell from prefix sums [kind, cut]."""
        members, by_kind = self._option_cells, span_sums(totals, self.spans)
        slowest: Array = by_kind[members.kind_numbers[members.first_members]]
        counts = np.diff(members.first_members, append=len(members.kind_numbers))
        for further in range(1, int(counts.max())):
            longer = np.flatnonzero(counts > further)
            slowest[longer] = np.maximum(
                slowest[longer], by_kind[members.kind_numbers[members.first_members[longer] + further]]
            )
        return slowest

    @cached_property
    def backward_seconds(self) -> Array:
        """Return [option, span] backward seconds without recompute."""
        return self._slowest(self._option_cells.prefix_sums[1])

    @cached_property
    def recompute_seconds(self) -> Array:
        """Return [option, span] seconds added by recomputing all layers."""
        return self._slowest(self._option_cells.prefix_sums[0])

    @cached_property
    def resident_values(self) -> Array:
        """Return [option, span] trained parameters resident on a rank."""
        return np.stack([self._stage_tables.resident_values(option.strategy.tensor) for option in self.options])

    @cached_property
    def _data_ring(self) -> DataRing:
        """Return the rings `[..., option, 1]` over replicas."""
        sets = [option.replica_set for option in self.options]
        ratios = [[s.ratios.all_reduce, s.ratios.all_gather, s.ratios.reduce_scatter] for s in sets]
        per_byte = np.array([[s.ring_seconds for s in sets]])[:, :, None]
        return DataRing(np.zeros_like(per_byte), per_byte, np.array(ratios).T[:, :, None])

    @cached_property
    def _data_degrees(self) -> Array:
        return np.array([float(option.strategy.data) for option in self.options])[:, None]

    @cached_property
    def base_seconds(self) -> Array:
        """Return [sharding, option, span] micro-batch seconds without recompute, with what replicas communicate in each."""
        base = self._slowest(self._option_cells.prefix_sums[0] + self._option_cells.prefix_sums[1])
        reduced = base + self._reduction_overhead() if Sharding.ZERO2 in self.shardings else base
        gathered = reduced + self._all_gather_overhead(base)
        by_sharding = {Sharding.ZERO2: reduced, Sharding.ZERO3: gathered}
        base_seconds = np.stack([by_sharding.get(sharding, base) for sharding in self.shardings])
        base_seconds[1:, self._data_degrees[:, 0] == 1] = np.inf
        return base_seconds

    def _all_gather_overhead(self, forward_backward: Array) -> Array:
        """Return [option, span] seconds that ZeRO-3 all-gathers add to a micro-batch.

        Each piece between two cuts is gathered while its predecessor (in the backward: its successor) computes.
        """
        context = self.replica_tables.problem.cost_context
        pieces = self._stage_tables.spans.pieces
        values = self.resident_values[:, pieces] + self._stage_tables.frozen_values[pieces]
        gather = self._data_ring.all_gather_seconds(values * context.model.dtype.num_bytes)
        backward = self.backward_seconds[:, pieces]
        forward = forward_backward[:, pieces] - backward
        in_forward, in_backward = (
            overlapped_seconds(gather, hidden, context.runtime.overlap_slowdown_ratio)
            for hidden in (hidden_by_previous(gather, forward), hidden_by_next(gather, backward))
        )
        return span_sums(prefix_sums(in_forward + in_backward), self.spans)

    def _reduction_overhead(self) -> Array | float:
        """Return [option, span] seconds that reducing gradients in every backward adds to a micro-batch.

        The gradients of each piece between two cuts are reduced while its predecessor computes its backward.
        """
        context = self.replica_tables.problem.cost_context
        if self.micro_batches == 1:
            return 0.0
        pieces = self._stage_tables.spans.pieces
        reduce = self._data_ring.reduce_scatter_seconds(
            self.resident_values[:, pieces] * context.gradient_dtype.num_bytes
        )
        hidden = hidden_by_previous(reduce, self.backward_seconds[:, pieces])
        exposed = overlapped_seconds(reduce, hidden, context.runtime.overlap_slowdown_ratio)
        return span_sums(prefix_sums(exposed), self.spans)

    @cached_property
    def shardings(self) -> tuple[Sharding, ...]:
        """Shardings that the tables distinguish."""
        context = self.replica_tables.problem.cost_context
        return sharding_choices(self.micro_batches, context)

    @cached_property
    def tail_seconds(self) -> Array:
        """Return [sharding, option, span] approximate seconds after the last backward: reduce, update and all-gather."""
        update = self._slowest(self._option_cells.prefix_sums[2])
        context = self.replica_tables.problem.cost_context
        tails = [
            tail_seconds(
                self.resident_values,
                update,
                self._data_ring,
                sharding,
                data=self._data_degrees,
                backward_seconds=self.backward_seconds,
                context=context,
            )
            for sharding in self.shardings
        ]
        return np.stack(tails)

    @cached_property
    def _free_bytes(self) -> Array:
        """Return [sharding, member, span] bytes left for in-flight activations."""
        context, members = self.replica_tables.problem.cost_context, self._option_cells
        buffers = self._stage_tables.boundary_row_bytes
        by_kind = members.device_bytes[:, None] - members.rows[:, None] * buffers.once
        free = (by_kind - members.workspace_bytes)[members.kind_numbers]
        resident = self.resident_values[members.option_numbers]
        one_value, data = np.ones((len(members.option_numbers), 1)), self._data_degrees[members.option_numbers]
        gathered = np.array(
            [self.replica_tables.max_gathered_bytes(option.strategy.tensor) for option in self.options]
        )[members.option_numbers]
        free_bytes = np.empty((len(self.shardings), *free.shape))
        for index, sharding in enumerate(self.shardings):
            accumulates = context.keeps_whole_gradients(self.micro_batches)
            state = state_bytes(one_value, one_value / data, sharding, context.value_bytes, accumulates=accumulates)
            np.subtract(free, resident * state.total, out=free_bytes[index])
            if any(kind.frozen_parameters for kind in context.model.kinds):
                frozen = self._stage_tables.frozen_values * context.value_bytes.weight
                free_bytes[index] -= frozen / (data if sharding is Sharding.ZERO3 else 1)
            if sharding is Sharding.ZERO3:
                free_bytes[index] -= gathered[:, None]
        return free_bytes

    @cached_property
    def _in_flight_bytes(self) -> tuple[Array, Array, Array]:
        """Return [kind, span] bytes stored per micro-batch, bytes that recompute saves, and bytes that it needs once."""
        members = self._option_cells
        stored = span_sums(members.prefix_sums[3], self.spans)
        whole, recomputed = (
            activation_bytes(stored, members.input_bytes, members.largest_layer_bytes[:, None], recompute=recompute)
            for recompute in (False, True)
        )
        saved = np.maximum(whole.per_micro_batch - recomputed.per_micro_batch, 1.0)
        buffers = self._stage_tables.boundary_row_bytes
        return whole.per_micro_batch + members.rows[:, None] * buffers.per_micro_batch, saved, recomputed.once

    @cached_property
    def _max_in_flight(self) -> Array:
        """Return [sharding, member] in-flight counts up to which every span fits."""
        in_flight_bytes = self._in_flight_bytes[0]
        in_flight: Array = (self._free_bytes / np.maximum(in_flight_bytes, 1.0)[self._option_cells.kind_numbers]).min(
            axis=2
        )
        return in_flight

    def costs(self, in_flight: int) -> StageCosts:
        """Return the costs with `in_flight` micro-batches."""
        if in_flight not in self._costs:
            self._costs[in_flight] = self._compute_costs(in_flight)
        return self._costs[in_flight]

    def _compute_costs(self, in_flight: int) -> StageCosts:
        in_flight_bytes, saved_bytes, recomputed_bytes = self._in_flight_bytes
        member_option = self._option_cells.option_numbers
        recompute_ratio = np.zeros_like(self.base_seconds)
        for sharding_number in range(len(self._max_in_flight)):
            members_short_of_memory = np.flatnonzero(self._max_in_flight[sharding_number] < in_flight)
            if not members_short_of_memory.size:
                continue
            kind = self._option_cells.kind_numbers[members_short_of_memory]
            # In place: allocating tables of megabytes takes longer than filling them.
            shortfall = (in_flight * in_flight_bytes)[kind]
            shortfall -= (
                self._free_bytes[sharding_number]
                if len(members_short_of_memory) == len(member_option)
                else self._free_bytes[sharding_number, members_short_of_memory]
            )
            has_room = shortfall <= 0
            shortfall += recomputed_bytes[kind]
            shortfall /= (in_flight * saved_bytes)[kind]
            ratio = shortfall
            np.putmask(ratio, has_room, 0.0)
            options, starts = np.unique(member_option[members_short_of_memory], return_index=True)
            recompute_ratio[sharding_number, options] = np.maximum.reduceat(ratio, starts, axis=0)
        if not recompute_ratio.any():
            return StageCosts(self.base_seconds, recompute_ratio)
        seconds = recompute_ratio * self.recompute_seconds
        seconds += self.base_seconds
        np.putmask(seconds, recompute_ratio > 1.0, np.inf)
        return StageCosts(seconds, recompute_ratio)
