"""What a replica of a stage takes and keeps: tables over the layers, for one kind of tensor group and number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trainwright.cost import memory
from trainwright.cost.collectives import ALONE, Collective
from trainwright.cost.compute import sync_seconds
from trainwright.runtime import CollectiveRatios
from trainwright.search.auto.cell import Cell
from trainwright.search.auto.rows import Share, shares
from trainwright.search.auto.stage_options import Counted, Team
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array
from trainwright.search.stage_memory import StageMemory


@dataclass
class Cells:
    """Tables of one problem, each made once.

    Attributes:
        most_cuts: models of more layers are cut only before every so many of them, evenly by their seconds.
    """

    problem: Problem
    most_cuts: int
    _cells: dict[tuple[str, ...], Cell] = field(default_factory=dict)
    _teams: dict[tuple[Counted, float, CollectiveRatios], Team] = field(default_factory=dict)
    _totals: dict[tuple[Cell, int], float] = field(default_factory=dict)
    _columns: dict[tuple[Cell, int], Array] = field(default_factory=dict)
    _shared: dict[tuple[Counted, int], dict[Cell, Share] | None] = field(default_factory=dict)
    _held: dict[int, Array] = field(default_factory=dict)
    _gathered: dict[int, float] = field(default_factory=dict)

    def cut_otherwise(self, most_cuts: int) -> Cells:
        """The same with other cuts; what does not depend on them is shared."""
        found = replace(self, most_cuts=most_cuts, _held={})
        found.memory = self.memory
        return found

    def cell(self, nodes: tuple[str, ...]) -> Cell:
        """The cell of devices on these nodes."""
        found = self._cells.get(nodes)
        if found is None:
            accelerator_of = self.problem.setting.accelerator_of_node
            found = self._cells[nodes] = Cell(tuple(sorted({accelerator_of[node] for node in nodes})), nodes)
        return found

    def team(self, counts: Counted, ring_seconds: float, ratios: CollectiveRatios) -> Team:
        """These cells with these rings."""
        key = (counts, ring_seconds, ratios)
        found = self._teams.get(key)
        if found is None:
            found = self._teams[key] = Team(counts, ring_seconds, ratios)
        return found

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Layers before which a stage may begin, and behind the last: all of them where they are few."""
        layers = len(self.problem.model.layers)
        if layers + 1 <= self.most_cuts:
            return tuple(range(layers + 1))
        weight = self._layer_weights
        total = np.concatenate([[0.0], np.cumsum(weight)])
        wanted = np.linspace(0, total[-1], self.most_cuts - 2)
        chosen = {int(np.argmin(np.abs(total - one))) for one in wanted} | {0, 1, layers - 1, layers}
        return tuple(sorted(chosen))

    @cached_property
    def _layer_weights(self) -> Array:
        accelerator = self.problem.cluster.node(self.problem.nodes[0]).accelerator
        costs = {k.name: self.problem.setting.layer_cost(accelerator, k, 1, 1) for k in self.problem.model.kinds}
        return np.array([costs[k].forward_seconds + costs[k].backward_seconds for k in self.problem.model.layers])

    @cached_property
    def capacity(self) -> dict[str, int]:
        """By accelerator: bytes that a device's plan may fill."""
        return {one.name: one.memory_bytes for one in self.problem.setting.cluster.accelerators}

    @cached_property
    def memory(self) -> StageMemory:
        return StageMemory(self.problem)

    def sums(self, several: Sequence[tuple[Cell, int]]) -> Array:
        """[forward | backward | update seconds | kept bytes, number, cut] of a micro-batch through all layers before the cut.

        For several cells, each with its rows.
        """
        columns = np.stack([self._by_kind(cell, rows) for cell, rows in several], axis=1)
        by_layer = columns[:, :, self._kind_numbers]
        totals = np.concatenate([np.zeros((4, len(several), 1)), np.cumsum(by_layer, axis=2)], axis=2)
        found: Array = totals[:, :, list(self.cuts)]
        return found

    def total_seconds(self, cell: Cell, rows: int) -> float:
        """Of a micro-batch of so many rows through the whole model."""
        key = (cell, rows)
        if key not in self._totals:
            columns = self._by_kind(cell, rows)
            counts = self._kind_counts
            self._totals[key] = float((columns[0] + columns[1]) @ counts)
        return self._totals[key]

    def shared(self, counts: Counted, rows: int) -> dict[Cell, Share] | None:
        """How these cells share the rows of a micro-batch; None where rows do not go round."""
        key = (counts, rows)
        if key not in self._shared:
            self._shared[key] = shares(dict(counts), rows, self.total_seconds)
        return self._shared[key]

    def _by_kind(self, cell: Cell, rows: int) -> Array:
        """[forward | backward | update | kept bytes, kind]."""
        key = (cell, rows)
        if key not in self._columns:
            setting, collective = self.problem.setting, self._collective(cell)
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
        return ALONE if cell.tensor == 1 else self.problem.setting.collectives.all_reduce((cell.nodes,))

    @cached_property
    def _kind_numbers(self) -> list[int]:
        number = {kind.name: index for index, kind in enumerate(self.problem.model.kinds)}
        return [number[name] for name in self.problem.model.layers]

    @cached_property
    def _kind_counts(self) -> Array:
        return np.bincount(self._kind_numbers, minlength=len(self.problem.model.kinds)).astype(float)

    def held_values(self, tensor: int) -> Array:
        """[first, end] values that a rank holds, by cut."""
        if tensor not in self._held:
            cuts = list(self.cuts)
            self._held[tensor] = np.maximum(self.memory.held_parameters(tensor)[np.ix_(cuts, cuts)], 0.0)
        return self._held[tensor]

    @cached_property
    def row_bytes(self) -> Array:
        """[cut] of what one row brings over a boundary there."""
        result: Array = self.memory.row_bytes[list(self.cuts)]
        return result

    @cached_property
    def input_bytes(self) -> Array:
        """[cut] what all layers before it keep of one row where they are recomputed: their inputs."""
        result: Array = np.concatenate([[0.0], np.cumsum(self.memory.row_bytes[:-1])])[list(self.cuts)]
        return result

    def recompute(self, cell: Cell, rows: int) -> tuple[Array, Array]:
        """[layer] seconds that computing it again takes, and bytes of a micro-batch that this spares."""
        by_layer = self._by_kind(cell, rows)[:, self._kind_numbers]
        inputs = rows * self.memory.row_bytes[:-1]
        return by_layer[0], np.maximum(by_layer[3] - inputs, 0.0)

    def largest_kept(self, several: Sequence[tuple[Cell, int]]) -> Array:
        """[number] bytes that the layer keeps which keeps most; of cells with their rows."""
        found: Array = np.stack([self._by_kind(cell, rows)[3] for cell, rows in several]).max(axis=1)
        return found

    def gathered_values(self, tensor: int) -> float:
        """Values of the two largest neighbouring layers."""
        if tensor not in self._gathered:
            setting, model = self.problem.setting, self.problem.model
            sizes = [setting.values_at(model.kind_of(layer), tensor) for layer in range(len(model.layers))]
            self._gathered[tensor] = float(max(a + b for a, b in zip([0, *sizes], sizes, strict=False)))
        return self._gathered[tensor]

    def loss_bytes(self, tensor: int, rows: int) -> int:
        return memory.loss_bytes(self.problem.setting, tensor, rows)
