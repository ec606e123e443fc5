"""Seconds and bytes of a replica over all layers, by cell and number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trainwright.cost import memory
from trainwright.cost.collectives import NO_COMMUNICATION, Collective
from trainwright.cost.layer_sums import Array, prefix_sums
from trainwright.cost.layer_times import sync_seconds
from trainwright.cost.memory_terms import activation_bytes, gathered_bytes
from trainwright.runtime import CollectiveRatios
from trainwright.search.auto.replica_sets import Cell, CellCounts, ReplicaSet, RowSplit, balance_rows
from trainwright.search.problem import Problem


@dataclass
class ReplicaTables:
    """Cached tables of one problem.

    Attributes:
        max_cuts: approximate maximum number of cuts, spread evenly by layer seconds.
    """

    problem: Problem
    max_cuts: int
    _cells: dict[tuple[str, ...], Cell] = field(default_factory=dict)
    _replica_sets: dict[tuple[CellCounts, float, CollectiveRatios], ReplicaSet] = field(default_factory=dict)
    _totals: dict[tuple[Cell, int], float] = field(default_factory=dict)
    _columns: dict[tuple[Cell, int], Array] = field(default_factory=dict)
    _row_splits: dict[tuple[CellCounts, int], dict[Cell, RowSplit] | None] = field(default_factory=dict)
    _resident: dict[int, Array] = field(default_factory=dict)
    _gathered: dict[int, int] = field(default_factory=dict)

    def with_max_cuts(self, max_cuts: int) -> ReplicaTables:
        """Return tables with other cuts that share everything independent of cuts."""
        return replace(self, max_cuts=max_cuts, _resident={})

    def cell(self, nodes: tuple[str, ...]) -> Cell:
        """Return the interned cell of devices on these nodes."""
        found = self._cells.get(nodes)
        if found is None:
            accelerator_of = self.problem.cost_context.accelerator_of_node
            found = self._cells[nodes] = Cell(tuple(sorted({accelerator_of[node] for node in nodes})), nodes)
        return found

    def replica_set(self, counts: CellCounts, ring_seconds: float, ratios: CollectiveRatios) -> ReplicaSet:
        """Return the interned replica set."""
        key = (counts, ring_seconds, ratios)
        found = self._replica_sets.get(key)
        if found is None:
            found = self._replica_sets[key] = ReplicaSet(counts, ring_seconds, ratios)
        return found

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Return layer indices where stages may start, plus the end; all of them if few."""
        layers = len(self.problem.model.layers)
        if layers + 1 <= self.max_cuts:
            return tuple(range(layers + 1))
        total = prefix_sums(self._layer_seconds)
        even_cuts = np.linspace(0, total[-1], self.max_cuts - 2)
        chosen = {int(np.argmin(np.abs(total - one))) for one in even_cuts} | {0, 1, layers - 1, layers}
        return tuple(sorted(chosen))

    @cached_property
    def _layer_seconds(self) -> Array:
        accelerator = self.problem.cluster.node(self.problem.nodes[0]).accelerator
        costs = {k.name: self.problem.cost_context.layer_cost(accelerator, k, 1, 1) for k in self.problem.model.kinds}
        return np.array([costs[k].forward_seconds + costs[k].backward_seconds for k in self.problem.model.layers])

    @cached_property
    def device_bytes(self) -> dict[str, int]:
        """Return each accelerator's memory bytes."""
        return {one.name: one.memory_bytes for one in self.problem.cost_context.cluster.accelerators}

    def prefix_sums(self, cell_rows: Sequence[tuple[Cell, int]]) -> Array:
        """Return [forward | backward | update seconds | stored bytes, index, cut] of a micro-batch before each cut."""
        columns = np.stack([self._kind_costs(cell, rows) for cell, rows in cell_rows], axis=1)
        found: Array = prefix_sums(columns[:, :, self._kind_numbers])[:, :, list(self.cuts)]
        return found

    def total_seconds(self, cell: Cell, rows: int) -> float:
        """Return seconds of a micro-batch through the whole model."""
        key = (cell, rows)
        if key not in self._totals:
            columns = self._kind_costs(cell, rows)
            counts = self._kind_counts
            self._totals[key] = float((columns[0] + columns[1]) @ counts)
        return self._totals[key]

    def row_splits(self, counts: CellCounts, rows: int) -> dict[Cell, RowSplit] | None:
        """Return how the cells split a micro-batch's rows; None if rows are fewer than cells."""
        key = (counts, rows)
        if key not in self._row_splits:
            self._row_splits[key] = balance_rows(dict(counts), rows, self.total_seconds)
        return self._row_splits[key]

    def _kind_costs(self, cell: Cell, rows: int) -> Array:
        """Return [forward | backward | update seconds | stored bytes, kind]."""
        key = (cell, rows)
        if key not in self._columns:
            setting, collective = self.problem.cost_context, self._collective(cell)
            unit = rows * setting.model.dtype.num_bytes
            columns = []
            for kind in self.problem.model.kinds:
                costs = [setting.layer_cost(name, kind, cell.tensor, rows) for name in cell.accelerators]
                forward_sync, backward_sync = sync_seconds(kind, cell.tensor, unit, collective)
                columns.append(
                    (
                        max(cost.forward_seconds for cost in costs) + forward_sync,
                        max(cost.backward_seconds for cost in costs) + backward_sync,
                        max(cost.update_seconds for cost in costs),
                        max(cost.activation_bytes for cost in costs),
                    )
                )
            self._columns[key] = np.array(columns).T
        return self._columns[key]

    def _collective(self, cell: Cell) -> Collective:
        return NO_COMMUNICATION if cell.tensor == 1 else self.problem.cost_context.collectives.all_reduce((cell.nodes,))

    @cached_property
    def _kind_numbers(self) -> list[int]:
        number = {kind.name: index for index, kind in enumerate(self.problem.model.kinds)}
        return [number[name] for name in self.problem.model.layers]

    @cached_property
    def _kind_counts(self) -> Array:
        return np.bincount(self._kind_numbers, minlength=len(self.problem.model.kinds)).astype(float)

    def resident_values(self, tensor: int) -> Array:
        """Return [first, end] parameters resident on a rank, by cut."""
        if tensor not in self._resident:
            cuts = list(self.cuts)
            self._resident[tensor] = self.problem.cost_context.resident_values(tensor)[np.ix_(cuts, cuts)]
        return self._resident[tensor]

    @cached_property
    def row_bytes(self) -> Array:
        """Return [cut] boundary bytes per row."""
        result: Array = self._row_bytes[list(self.cuts)]
        return result

    @cached_property
    def _row_bytes(self) -> Array:
        return np.array(self.problem.cost_context.row_bytes, dtype=np.float64)

    @cached_property
    def input_bytes(self) -> Array:
        """Return [cut] input bytes per row that the layers before it store when recomputed."""
        result: Array = prefix_sums(self._row_bytes[:-1])[list(self.cuts)]
        return result

    def recompute_costs(self, cell: Cell, rows: int) -> tuple[Array, Array]:
        """Return [layer] recompute seconds, and bytes saved per micro-batch."""
        by_layer = self._kind_costs(cell, rows)[:, self._kind_numbers]
        inputs = rows * self._row_bytes[:-1]
        whole, recomputed = (
            activation_bytes(by_layer[3], inputs, by_layer[3], recompute=recompute) for recompute in (False, True)
        )
        return by_layer[0], np.maximum(whole.per_micro_batch - recomputed.per_micro_batch, 0.0)

    def largest_stored_bytes(self, cell_rows: Sequence[tuple[Cell, int]]) -> Array:
        """Return [index] stored bytes of the largest layer, per (cell, rows)."""
        found: Array = np.stack([self._kind_costs(cell, rows)[3] for cell, rows in cell_rows]).max(axis=1)
        return found

    def max_gathered_bytes(self, tensor: int) -> int:
        """Return the bytes of gathered weights on a rank with all layers."""
        if tensor not in self._gathered:
            setting, model = self.problem.cost_context, self.problem.model
            sizes = [setting.parameters_per_rank(model.kind_of(layer), tensor) for layer in range(len(model.layers))]
            self._gathered[tensor] = gathered_bytes(sizes, setting.value_bytes)
        return self._gathered[tensor]

    def loss_bytes(self, tensor: int, rows: int) -> int:
        return memory.loss_bytes(self.problem.cost_context, tensor, rows)
