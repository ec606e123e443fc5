"""Which of several equal devices plays which role of a new plan, so that as much state as possible stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.links import node_classes
from trainwright.plan import Plan
from trainwright.search.preference.state import WHOLE, Moves, Seat, seats
from trainwright.search.protocol import Problem

MOST_PAIRS = 20_000
"""Beyond so many pairs of roles and nodes that differ, shards of one slice are taken for equal while nodes are chosen."""


def aligned(new: Plan, old: Plan, problem: Problem) -> Plan:
    """The new plan with interchangeable nodes, and the slots of every node, changed so that the least state moves.

    What it costs is left as it is: nodes change places only within a class (`node_classes`), and with nodes that
    plans may use. The new plan itself where nothing is won.
    """
    mapping = _Alignment(new, old, problem).mapping()
    moved = tuple(
        replace(
            pipeline,
            stages=tuple(replace(stage, devices=tuple(mapping[d] for d in stage.devices)) for stage in pipeline.stages),
        )
        for pipeline in new.pipelines
    )
    return new if moved == new.pipelines else replace(new, pipelines=moved)


@dataclass
class _Alignment:
    new: Plan
    old: Plan
    problem: Problem
    moves: Moves = field(init=False)

    def __post_init__(self) -> None:
        self.moves = Moves(self.problem.setting)
        self.before, self.after = seats(self.old), seats(self.new)
        self.roles: dict[str, list[Device]] = {}
        for device in self.new.devices:
            self.roles.setdefault(device.node, []).append(device)

    def mapping(self) -> dict[Device, Device]:
        """By device of the new plan: the one that takes its role."""
        cluster = self.problem.cluster
        class_of = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))
        places: dict[int, list[str]] = {}
        for name in self.problem.nodes:
            places.setdefault(class_of[name], []).append(name)
        found: dict[Device, Device] = {}
        for number, names in places.items():
            roles = [name for name in self.roles if class_of[name] == number]
            if roles:
                for role, place in self._nodes(roles, names):
                    found |= self._slots(role, place)
        # Nodes that the problem does not allow stay: the plan is another's.
        return {device: found.get(device, device) for device in self.new.devices}

    def _nodes(self, roles: list[str], places: list[str]) -> list[tuple[str, str]]:
        """Which node takes the role of which."""
        if len(places) == 1:
            return [(roles[0], places[0])]
        mine, theirs = self._signatures(roles, places)
        distinct_mine, distinct_theirs = list(dict.fromkeys(mine)), list(dict.fromkeys(theirs))
        table = np.array(
            [[_least(self._table(needed, held))[0] for held in distinct_theirs] for needed in distinct_mine],
            dtype=float,
        )
        rows = np.array([distinct_mine.index(one) for one in mine])
        columns = np.array([distinct_theirs.index(one) for one in theirs])
        cost = table[np.ix_(rows, columns)]
        # Half a byte keeps a node in its own role where nothing else is won.
        stays = np.array([[role == place for place in places] for role in roles])
        chosen = _least(cost - 0.5 * stays)[1]
        return [(role, places[place]) for role, place in zip(roles, chosen, strict=True)]

    def _signatures(self, roles: list[str], places: list[str]) -> tuple[list[tuple[Seat, ...]], list[tuple[Seat, ...]]]:
        """What the devices of a role need and those of a place hold; coarser where there would be too many pairs."""
        mine = [tuple(sorted(self.after[device] for device in self.roles[role])) for role in roles]
        theirs = [tuple(sorted(self._held(place))) for place in places]
        if len(set(mine)) * len(set(theirs)) > MOST_PAIRS:
            mine, theirs = ([tuple(map(_coarse, one)) for one in many] for many in (mine, theirs))
        return mine, theirs

    def _held(self, place: str) -> list[Seat]:
        return [self.before.get(Device(place, slot), ()) for slot in range(self.problem.cluster.node(place).devices)]

    def _slots(self, role: str, place: str) -> dict[Device, Device]:
        """Which slot of the place takes the role of which device."""
        devices = self.roles[role]
        table = self._table([self.after[device] for device in devices], self._held(place))
        stays = np.array([[device.slot == slot for slot in range(table.shape[1])] for device in devices])
        chosen = _least(table - 0.5 * stays)[1]
        return {device: Device(place, slot) for device, slot in zip(devices, chosen, strict=True)}

    def _table(self, needed: Sequence[Seat], held: Sequence[Seat]) -> NDArray[np.float64]:
        """[needed, held] bytes to move."""
        return np.array([[self.moves.new_bytes(one, seat) for one in held] for seat in needed], dtype=float)


def _least(cost: NDArray[np.float64]) -> tuple[float, list[int]]:
    """The least sum that gives every row a column of its own, and those columns."""
    if len(cost) == 1:
        column = int(np.argmin(cost[0]))
        return float(cost[0, column]), [column]
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - SciPy is slow to load

    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].sum()), [int(column) for column in columns]


def _coarse(seat: Seat) -> Seat:
    return tuple(replace(share, weights=WHOLE, optimizer=WHOLE) for share in seat)
