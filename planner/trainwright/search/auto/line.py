"""Devices in a row, cut into units: a stage takes consecutive units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise, permutations

from trainwright.cluster import Device
from trainwright.cost.links import node_classes
from trainwright.search.node_order import device_order
from trainwright.search.protocol import Problem

MOST_CLASSES = 6
"""Where more kinds of nodes are told apart by their links, only accelerators and sizes are."""


@dataclass(frozen=True, eq=False)
class Line:
    """Devices in the order in which pipelines go over them.

    Attributes:
        cuts: positions in `devices` at which a stage may begin or end, 0 and the number of devices included.
        classes: by device: the kind of its node.
        shared_ends: units at the beginning, and at the end, between which one node's devices are divided; else None. The
            first stage is on the former, the last on the latter, so that they share weights inside the node.
    """

    devices: tuple[Device, ...]
    cuts: tuple[int, ...]
    classes: tuple[int, ...]
    shared_ends: tuple[int, int] | None = None

    @property
    def units(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def counts(self) -> tuple[Counter[int], ...]:
        """By unit: devices of every kind."""
        return tuple(Counter(self.classes[a:z]) for a, z in pairwise(self.cuts))

    def part(self, classes: frozenset[int]) -> Line:
        """The units that hold devices of these kinds alone, in the same order."""
        devices: list[Device] = []
        kinds: list[int] = []
        cuts = [0]
        for a, z in pairwise(self.cuts):
            if classes.issuperset(self.classes[a:z]):
                devices += self.devices[a:z]
                kinds += self.classes[a:z]
                cuts.append(len(devices))
        return Line(tuple(devices), tuple(cuts), tuple(kinds))


_Unit = tuple[int, tuple[Device, ...]]
"""The number of the kind of its nodes, and its devices."""


def lines(problem: Problem, most_units: int, most_orders: int, most_shared_ends: int) -> list[Line]:
    """Orders that are worth a try: kinds of nodes one after the other, in several orders, and evenly mixed.

    At most `most_orders` of the kinds. Each is cut into about `most_units` units: what the dynamic programme looks at grows
    with their square. Where just the first and the last layer share a weight, orders are there once more with a node whose
    devices stand at both ends, up to `most_shared_ends` of them.
    """
    kinds = kinds_of(problem)
    units = [_units(problem, number, nodes, most_units) for number, nodes in enumerate(kinds)]
    orders = [[unit for number in order for unit in units[number]] for order in _orders(len(kinds), most_orders)]
    if len(kinds) > 1:
        orders.append(_mixed(units))
    found = [_line(order) for order in orders]
    if problem.model.owners == (0, len(problem.model.layers) - 1):
        shared = (line for order in orders if (line := _with_shared_ends(order)) is not None)
        found += islice(shared, most_shared_ends)
    return found


def _with_shared_ends(order: Sequence[_Unit]) -> Line | None:
    """The same, with the second half of the first node's devices behind the last; None where it has but one, or all."""
    number, devices = order[0]
    node = devices[0].node
    size = sum(device.node == node for device in devices)
    mine = [device for _, unit in order for device in unit if device.node == node]
    if len(mine) < 2 or len(mine) == sum(len(unit) for _, unit in order):
        return None
    half = len(mine) // 2
    first, last = (
        [(number, tuple(part[start : start + size])) for start in range(0, len(part), size)]
        for part in (mine[half:], mine[:half])
    )
    others = ((kind, tuple(one for one in unit if one.node != node)) for kind, unit in order)
    return _line([*first, *((kind, unit) for kind, unit in others if unit), *last], (len(first), len(last)))


def kinds_of(problem: Problem) -> list[list[str]]:
    """Names of the nodes in use by kind; kinds and nodes in the order that does not depend on names."""
    names = list(dict.fromkeys(device.node for device in device_order(problem).devices))
    cluster = problem.cluster
    twins = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))
    for by_links in (True, False):
        groups: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            node = cluster.node(name)
            groups.setdefault((node.accelerator, node.devices, twins[name] if by_links else 0), []).append(name)
        if len(groups) <= MOST_CLASSES:
            break
    return list(groups.values())


def _orders(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """The fastest first and last, then others, spread over all."""
    every = list(permutations(range(count)))
    step = max(len(every) // most, 1)
    yield from list(dict.fromkeys((every[0], every[-1], *every[::step])))[:most]


def _units(problem: Problem, number: int, nodes: Sequence[str], most_units: int) -> list[_Unit]:
    """The devices of one kind of nodes in units of about the same size, none of which ends inside another's node."""
    least = -(-len(problem.devices) // most_units)
    per_node = problem.cluster.node(nodes[0]).devices
    if least <= per_node:
        size = next(part for part in range(least, per_node + 1) if per_node % part == 0)
    else:
        size = -(-least // per_node) * per_node
    devices = [Device(name, slot) for name in nodes for slot in range(per_node)]
    return [(number, tuple(devices[start : start + size])) for start in range(0, len(devices), size)]


def _mixed(units: Sequence[Sequence[_Unit]]) -> list[_Unit]:
    """Units of all kinds, each kind spread evenly over the line."""
    placed = [
        ((index + 0.5) / len(some), number, unit)
        for number, some in enumerate(units)
        for index, unit in enumerate(some)
    ]
    return [unit for _, _, unit in sorted(placed, key=lambda one: one[:2])]


def _line(units: Sequence[_Unit], shared_ends: tuple[int, int] | None = None) -> Line:
    devices: list[Device] = []
    kinds: list[int] = []
    cuts = [0]
    for number, some in units:
        devices += some
        kinds += [number] * len(some)
        cuts.append(len(devices))
    return Line(tuple(devices), tuple(cuts), tuple(kinds), shared_ends)
