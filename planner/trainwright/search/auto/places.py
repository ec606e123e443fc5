"""Where stages may stand on a line of devices: their tensor groups, their rings, and the links between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.links import links_of
from trainwright.search.auto.cell import Cell
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.line import Line
from trainwright.search.auto.stage_options import Rings
from trainwright.search.degrees import profiled, tensor_degrees
from trainwright.search.spans import Array


@dataclass(frozen=True, slots=True)
class Section:
    """A stage: units [first_unit, end_unit) of the line hold layers between cuts [first, end)."""

    first_unit: int
    end_unit: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Place:
    """What the time of a stage on consecutive units depends on: its cells for every tensor degree, and its rings."""

    cells: tuple[tuple[tuple[Cell, int], ...], ...]
    rings: Rings


@dataclass
class Places:
    """The places of a line; what does not depend on rows.

    Attributes:
        most_tensor: tensor groups reach beyond a node up to so many devices.
    """

    cells: Cells
    line: Line
    most_tensor: int = 0
    _made: list[Cell] = field(default_factory=list)
    """All cells, each once."""
    _numbers: dict[Cell, int] = field(default_factory=dict)
    """Their numbers in it."""
    _starting: dict[int, list[int]] = field(default_factory=dict)
    """By tensor degree: number of the cell that begins with each device of the line."""

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Tensor degrees that the limits and the profiles allow."""
        problem = self.cells.problem
        largest = max(self.most_tensor, *(problem.cluster.node(device.node).devices for device in self.line.devices))
        most = min(problem.limits.max_tensor_degree or largest, largest)
        powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
        found = sorted({degree for size in {*powers, most} for degree in tensor_degrees(problem.model, size, most)})
        names = tuple(dict.fromkeys(problem.cluster.node(device.node).accelerator for device in self.line.devices))
        return tuple(degree for degree in found if profiled(problem.model, problem.profiles, names, degree))

    @cached_property
    def numbers(self) -> NDArray[np.intp]:
        """[first unit, unit behind the last] number of the place in `found`; -1 where there is none."""
        self.found: list[Place] = []
        known: dict[Place, int] = {}
        units = self.line.units
        table = np.full((units + 1, units + 1), -1, dtype=np.intp)
        for first in range(units):
            for end in range(first + 1, units + 1):
                place = self._place(first, end)
                if place.cells:
                    table[first, end] = known.setdefault(place, len(known))
        self.found = list(known)
        return table

    def _place(self, first: int, end: int) -> Place:
        degrees = []
        for tensor in self.tensors:
            numbers = self._numbers_of(first, end, tensor)
            if numbers is not None:
                counted = ((self._made[number], count) for number, count in Counter(numbers).items())
                degrees.append(tuple(sorted(counted, key=lambda one: (one[0].accelerators, one[0].nodes))))
        return Place(tuple(degrees), self._rings(first, end))

    def cells_of(self, first: int, end: int, tensor: int) -> tuple[Cell, ...] | None:
        """The cells of a stage, replica by replica; None where the degree does not divide its devices."""
        numbers = self._numbers_of(first, end, tensor)
        return None if numbers is None else tuple(self._made[number] for number in numbers)

    def _numbers_of(self, first: int, end: int, tensor: int) -> list[int] | None:
        a, z = self.line.cuts[first], self.line.cuts[end]
        if (z - a) % tensor:
            return None
        if tensor not in self._starting:
            starts = range(len(self._nodes) - tensor + 1)
            self._starting[tensor] = [self._number_of(self._cell(start, tensor)) for start in starts]
        return self._starting[tensor][a:z:tensor]

    def _number_of(self, cell: Cell) -> int:
        if cell not in self._numbers:
            self._numbers[cell] = len(self._made)
            self._made.append(cell)
        return self._numbers[cell]

    def _cell(self, start: int, tensor: int) -> Cell:
        nodes = self._nodes[start : start + tensor]
        if len(set(nodes)) == 1:
            nodes = (self._first_of_kind[self.line.classes[start]],) * tensor
        return Cell(tuple(sorted({self._accelerators[node] for node in nodes})), nodes)

    @cached_property
    def _nodes(self) -> tuple[str, ...]:
        return tuple(device.node for device in self.line.devices)

    @cached_property
    def _accelerators(self) -> dict[str, str]:
        return self.cells.problem.setting.accelerator_of_node

    @cached_property
    def _first_of_kind(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for node, kind in zip(self._nodes, self.line.classes, strict=True):
            found.setdefault(kind, node)
        return found

    def _rings(self, first: int, end: int) -> Rings:
        a, z = self.line.cuts[first], self.line.cuts[end]
        nodes = np.array(list(dict.fromkeys(self._node_numbers[a:z])))
        bandwidth = self._bandwidth
        inside = float(bandwidth[nodes, nodes].min())
        between = flow = np.inf
        if len(nodes) > 1:
            names = [self.cells.problem.cluster.nodes[number].name for number in nodes.tolist()]
            flow = min(map(self.cells.problem.setting.fabric.flow, pairwise([*names, names[0]])))
            following = np.append(nodes[1:], nodes[:1])
            between = float(np.maximum(bandwidth[nodes, following], bandwidth[following, nodes]).min())
        members = max((z - a) // len(nodes), 1)
        return Rings(len(nodes), members, inside if members > 1 else np.inf, between, flow)

    @cached_property
    def _bandwidth(self) -> Array:
        """[source, target] bytes per second that a transfer reaches between nodes of the cluster."""
        problem = self.cells.problem
        reached: Array = links_of(problem.cluster).bandwidth * problem.runtime.link_ratio
        return reached

    @cached_property
    def _node_numbers(self) -> tuple[int, ...]:
        number = {node.name: index for index, node in enumerate(self.cells.problem.cluster.nodes)}
        return tuple(number[node] for node in self._nodes)

    @cached_property
    def edge_seconds(self) -> Array:
        """[unit] seconds per byte both ways over the link to the unit before it; 0 for the first."""
        bandwidth, found = self._bandwidth, np.zeros(self.line.units + 1)
        for unit in range(1, self.line.units):
            here, before = self._node_numbers[self.line.cuts[unit]], self._node_numbers[self.line.cuts[unit] - 1]
            found[unit] = 1 / bandwidth[here, before] + 1 / bandwidth[before, here]
        return found

    def tied_seconds(self, sections: Sequence[Section]) -> float:
        """About what summing the gradients of weights that several stages share takes."""
        kinds = self.cells.problem.model.kinds
        sizes = {kind.shared_weight: kind.shared_parameters for kind in kinds if kind.shared_weight is not None}
        return sum(self._tied_seconds(name, size, sections) for name, size in sizes.items())

    def _tied_seconds(self, name: str, size: int, sections: Sequence[Section]) -> float:
        setting, cuts = self.cells.problem.setting, self.cells.cuts
        model = setting.model
        layers = [layer for layer in model.owners if model.kind_of(layer).shared_weight == name]
        owners = [one for one in sections if any(cuts[one.first] <= layer < cuts[one.end] for layer in layers)]
        if len(owners) < 2:
            return 0.0
        nodes: dict[int, None] = {}
        for section in owners:
            nodes.update(
                dict.fromkeys(self._node_numbers[self.line.cuts[section.first_unit] : self.line.cuts[section.end_unit]])
            )
        used = np.array(list(nodes))
        following = np.roll(used, -1)
        slowest = np.maximum(self._bandwidth[used, following], self._bandwidth[following, used]).min()
        members = max(len(used), 2)
        return size * setting.gradient_dtype.num_bytes * 2 * (members - 1) / members / float(slowest)
