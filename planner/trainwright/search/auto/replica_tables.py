"""Seconds and bytes of a replica over all layers, by group and number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trainwright.cost.collectives import NO_COMMUNICATION, Collective
from trainwright.cost.layer_sums import Array, prefix_sums
from trainwright.cost.memory_terms import activation_bytes, gathered_bytes
from trainwright.cost.stage_tables import StageSpans, StageTables
from trainwright.cost.time_terms import TensorGroupClass, kind_table
from trainwright.layer import WHOLE_LAYER
from trainwright.runtime import CollectiveRatios
from trainwright.search.auto.replica_sets import GroupCounts, ReplicaSet, RowSplit, balance_rows
from trainwright.search.problem import Problem


@dataclass
class ReplicaTables:
    """Cached tables of one problem.

    Attributes:
        max_cuts: approximate maximum number of cuts, spread evenly by layer seconds.
    """

    problem: Problem
    max_cuts: int
    nodes_of_group: dict[TensorGroupClass, tuple[str, ...]] = field(default_factory=dict)
    _groups: dict[tuple[str, ...], TensorGroupClass] = field(default_factory=dict)
    _equal_groups: dict[tuple[tuple[str, ...], int, Collective], TensorGroupClass] = field(default_factory=dict)
    _replica_sets: dict[tuple[GroupCounts, float, CollectiveRatios], ReplicaSet] = field(default_factory=dict)
    _totals: dict[tuple[TensorGroupClass, int], float] = field(default_factory=dict)
    _columns: dict[tuple[TensorGroupClass, int], Array] = field(default_factory=dict)
    _row_splits: dict[tuple[GroupCounts, int], dict[TensorGroupClass, RowSplit] | None] = field(default_factory=dict)
    _gathered: dict[int, int] = field(default_factory=dict)

    def with_max_cuts(self, max_cuts: int) -> ReplicaTables:
        """Return tables with other cuts that share everything independent of cuts."""
        return replace(self, max_cuts=max_cuts)

    def tensor_group(self, nodes: tuple[str, ...]) -> TensorGroupClass:
        """Return the interned class of groups on these nodes, which groups on others with an equal ring share.

        One node stands for interchangeable ones in groups inside a node.
        """
        group_class = self._groups.get(nodes)
        if group_class is None:
            context = self.problem.cost_context
            names = tuple(sorted({context.accelerator_of_node[node] for node in nodes}))
            ring = NO_COMMUNICATION if len(nodes) == 1 else context.collectives.all_reduce((nodes,))
            key = names, len(nodes), ring
            group_class = self._groups[nodes] = self._equal_groups.setdefault(key, TensorGroupClass(*key))
            self.nodes_of_group.setdefault(group_class, nodes)
        return group_class

    def replica_set(self, counts: GroupCounts, ring_seconds: float, ratios: CollectiveRatios) -> ReplicaSet:
        """Return the interned replica set."""
        key = (counts, ring_seconds, ratios)
        replica_set = self._replica_sets.get(key)
        if replica_set is None:
            replica_set = self._replica_sets[key] = ReplicaSet(counts, ring_seconds, ratios)
        return replica_set

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Return layer indices where stages may start, plus the end; all of them if few."""
        layers = len(self.problem.model.layers)
        if layers + 1 <= self.max_cuts:
            return tuple(range(layers + 1))
        total = prefix_sums(self._layer_seconds)
        even_cuts = np.linspace(0, total[-1], self.max_cuts - 2)
        chosen = {int(np.argmin(np.abs(total - cut))) for cut in even_cuts} | {0, 1, layers - 1, layers}
        return tuple(sorted(chosen))

    @cached_property
    def stage_tables(self) -> StageTables:
        """Return the tables of stages between these cuts."""
        return StageTables(self.problem.cost_context, StageSpans(self.problem.model, self.cuts))

    @cached_property
    def _layer_seconds(self) -> Array:
        accelerator = self.problem.cluster.node(self.problem.nodes[0]).accelerator
        costs = {
            k.name: self.problem.cost_context.layer_cost(accelerator, k, WHOLE_LAYER, 1)
            for k in self.problem.model.kinds
        }
        return np.array([costs[k].forward_seconds + costs[k].backward_seconds for k in self.problem.model.layers])

    @cached_property
    def device_bytes(self) -> dict[str, int]:
        """Return each accelerator's memory bytes, without the runtime's constant part."""
        context = self.problem.cost_context
        constant_bytes_of = context.runtime.constant_bytes_of
        return {
            accelerator.name: accelerator.memory_bytes - constant_bytes_of(accelerator.name)
            for accelerator in context.cluster.accelerators
        }

    def prefix_sums(self, group_rows: Sequence[tuple[TensorGroupClass, int]]) -> Array:
        """Return [forward | backward | update seconds | stored bytes, index, cut] of a micro-batch before each cut."""
        columns = np.stack([self._kind_costs(group, rows) for group, rows in group_rows], axis=1)
        sums: Array = prefix_sums(columns[:, :, self.problem.cost_context.kind_numbers])[:, :, list(self.cuts)]
        return sums

    def total_seconds(self, group: TensorGroupClass, rows: int) -> float:
        """Return seconds of a micro-batch through the whole model."""
        key = (group, rows)
        if key not in self._totals:
            columns = self._kind_costs(group, rows)
            counts = self._kind_counts
            self._totals[key] = float((columns[0] + columns[1]) @ counts)
        return self._totals[key]

    def row_splits(self, counts: GroupCounts, rows: int) -> dict[TensorGroupClass, RowSplit] | None:
        """Return how the groups split a micro-batch's rows; None if rows are fewer than groups."""
        key = (counts, rows)
        if key not in self._row_splits:
            self._row_splits[key] = balance_rows(dict(counts), rows, self.total_seconds)
        return self._row_splits[key]

    def _kind_costs(self, group: TensorGroupClass, rows: int) -> Array:
        """Return [forward | backward | update seconds | stored bytes, kind]."""
        key = (group, rows)
        if key not in self._columns:
            table = kind_table(group, rows, self.problem.cost_context)
            self._columns[key] = np.array(
                [table.forward_pass_seconds, table.backward_pass_seconds, table.update_seconds, table.activation_bytes]
            )
        return self._columns[key]

    @cached_property
    def _kind_counts(self) -> Array:
        return np.bincount(self.problem.cost_context.kind_numbers, minlength=len(self.problem.model.kinds)).astype(
            float
        )

    def recompute_costs(self, group: TensorGroupClass, rows: int) -> tuple[Array, Array]:
        """Return [layer] recompute seconds, and bytes saved per micro-batch."""
        by_layer = self._kind_costs(group, rows)[:, self.problem.cost_context.kind_numbers]
        inputs = self.problem.cost_context.divided_activations.chosen_recomputed_bytes(group.tensor, rows)
        whole, recomputed = (
            activation_bytes(by_layer[3], inputs, by_layer[3], recompute=recompute) for recompute in (False, True)
        )
        return by_layer[0], np.maximum(whole.per_micro_batch - recomputed.per_micro_batch, 0.0)

    def largest_stored_bytes(self, group_rows: Sequence[tuple[TensorGroupClass, int]]) -> Array:
        """Return [index] bytes of the largest layer while it is recomputed, per (group, rows)."""
        stored = np.stack([self._kind_costs(group, rows)[3] for group, rows in group_rows])
        largest: Array = (stored + self.stage_tables.snapshot_bytes).max(axis=1)
        return largest

    def max_gathered_bytes(self, tensor: int) -> int:
        """Return the bytes of gathered weights on a rank with all layers."""
        if tensor not in self._gathered:
            context, model = self.problem.cost_context, self.problem.model
            parameters = context.divided_at(tensor).parameters
            sizes = [parameters(model.kind_of(layer)) for layer in range(len(model.layers))]
            self._gathered[tensor] = gathered_bytes(sizes, context.value_bytes)
        return self._gathered[tensor]
