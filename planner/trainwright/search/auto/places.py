"""Where stages may stand on a line of devices: their tensor groups, their rings, and the links between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.fabric import Fabric
from trainwright.cost.links import links_of
from trainwright.runtime import IDEAL_RINGS
from trainwright.search.auto.cell import Cell
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.line import Line
from trainwright.search.auto.stage_options import Rings, Team
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
    """What the time of a stage on consecutive units depends on: its teams, one for every tensor degree, and nodes spanned."""

    teams: tuple[Team, ...]
    nodes: int


@dataclass
class _GrowingRings:
    """The rings over nodes that join one after the other; see `Rings`."""

    bandwidth: Array
    fabric: Fabric
    names: Sequence[str]
    _nodes: dict[int, None] = field(default_factory=dict)
    _first: int = -1
    _last: int = -1
    _inside: float = np.inf
    _between: float = np.inf
    _flow: float = np.inf

    def take(self, nodes: Iterable[int]) -> None:
        """By their numbers; those that are there already stay where they are."""
        for node in nodes:
            if node not in self._nodes:
                self._nodes[node] = None
                self._inside = min(self._inside, float(self.bandwidth[node, node]))
                if self._last >= 0:
                    between, flow = self._step(self._last, node)
                    self._between, self._flow = min(self._between, between), min(self._flow, flow)
                else:
                    self._first = node
                self._last = node

    def over(self, devices: int) -> Rings:
        """Of so many devices on the nodes that joined."""
        count = len(self._nodes)
        members = max(devices // count, 1)
        between = flow = np.inf
        if count > 1:
            between, flow = self._step(self._last, self._first)
            between, flow = min(self._between, between), min(self._flow, flow)
        return Rings(count, members, self._inside if members > 1 else np.inf, between, flow)

    def _step(self, here: int, there: int) -> tuple[float, float]:
        bandwidth = max(float(self.bandwidth[here, there]), float(self.bandwidth[there, here]))
        return bandwidth, self.fabric.flow((self.names[here], self.names[there]))


@dataclass
class Places:
    """The places of a line; what does not depend on rows.

    Attributes:
        most_tensor: tensor groups reach beyond a node up to so many devices.
    """

    cells: Cells
    line: Line
    most_tensor: int = 0
    _known_cells: dict[int, list[Cell]] = field(default_factory=dict)
    """By tensor degree: the cell that begins with each device of the line."""

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
            for end, place in enumerate(self._from(first), start=first + 1):
                if place.teams:
                    table[first, end] = known.setdefault(place, len(known))
        self.found = list(known)
        return table

    @property
    def teams(self) -> dict[Team, None]:
        """Of all places, each once."""
        _ = self.numbers
        return dict.fromkeys(team for place in self.found for team in place.teams)

    def _from(self, first: int) -> Iterator[Place]:
        """The places that begin with a unit, each a unit longer than the one before."""
        ratios = self.cells.problem.runtime.collective_ratios
        start = self.line.cuts[first]
        rings = _GrowingRings(self._bandwidth, self.cells.problem.setting.fabric, self._names)
        counts = {tensor: Counter[Cell]() for tensor in self.tensors}
        counted_to = dict.fromkeys(self.tensors, start)
        for unit in range(first, self.line.units):
            end = self.line.cuts[unit + 1]
            rings.take(self._nodes_of_units[unit])
            ring = rings.over(end - start)
            teams = []
            for tensor in self.tensors:
                if (end - start) % tensor == 0:
                    counts[tensor].update(self._starting(tensor)[counted_to[tensor] : end : tensor])
                    counted_to[tensor] = end
                    seconds = ring.seconds_per_byte(tensor, end - start)
                    in_order = sorted(counts[tensor].items(), key=lambda one: (one[0].accelerators, one[0].nodes))
                    teams.append(self.cells.team(tuple(in_order), seconds, ratios if ring.nodes > 1 else IDEAL_RINGS))
            yield Place(tuple(teams), ring.nodes)

    def cells_of(self, first: int, end: int, tensor: int) -> list[Cell]:
        """The cells of a stage, replica by replica; the degree divides its devices."""
        return self._starting(tensor)[self.line.cuts[first] : self.line.cuts[end] : tensor]

    def _starting(self, tensor: int) -> list[Cell]:
        if tensor not in self._known_cells:
            starts = range(len(self._nodes) - tensor + 1)
            self._known_cells[tensor] = [self._cell(start, tensor) for start in starts]
        return self._known_cells[tensor]

    def _cell(self, start: int, tensor: int) -> Cell:
        nodes = self._nodes[start : start + tensor]
        if len(set(nodes)) == 1:
            nodes = (self._first_of_kind[self.line.classes[start]],) * tensor
        return self.cells.cell(nodes)

    @cached_property
    def _nodes(self) -> tuple[str, ...]:
        return tuple(device.node for device in self.line.devices)

    @cached_property
    def _first_of_kind(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for node, kind in zip(self._nodes, self.line.classes, strict=True):
            found.setdefault(kind, node)
        return found

    @cached_property
    def _nodes_of_units(self) -> tuple[tuple[int, ...], ...]:
        """By unit: the numbers of its nodes, each once."""
        return tuple(tuple(dict.fromkeys(self._node_numbers[a:z])) for a, z in pairwise(self.line.cuts))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.cells.problem.cluster.nodes)

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
