"""Devices that change their stage, are left out, or stand in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations

from trainwright.cluster import Device
from trainwright.plan import Plan
from trainwright.search.auto.moves.place import Move, Place

FARTHEST = 4
"""So far from each other are stages that change places."""
MOST_NODES = 4
"""Nodes of a stage, and nodes with devices that nobody uses, that are looked at one by one."""


def seats(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Devices handed to a neighbouring stage, a half, a quarter or a tensor group; or two stages that change places."""
    for place in taken_apart:
        stages = place.stages
        for number in range(len(stages) - 1):
            for giver, taker in ((number, number + 1), (number + 1, number)):
                step = max(stages[giver].most_tensor, stages[taker].most_tensor)
                data = len(stages[giver].devices) // step
                for count in dict.fromkeys((data // 2, data // 4, 1)):
                    if 0 < count < data and len(stages[taker].devices) + count * step <= place.rows * step:
                        yield partial(_reseated, place, giver, taker, count * step)
            yield partial(_swapped, place, number, number + 1)
        # Stages that have none between them went first.
        for number, other in combinations(range(len(stages)), 2):
            if 1 < other - number <= FARTHEST:
                yield partial(_swapped, place, number, other)


def _reseated(place: Place, giver: int, taker: int, count: int) -> Plan:
    gives, takes = place.stages[giver].devices, place.stages[taker].devices
    if giver < taker:
        gives, takes = gives[:-count], (*gives[-count:], *takes)
    else:
        gives, takes = gives[count:], (*takes, *gives[:count])
    changed = {
        number: place.stages[number].on(devices, place.rows) for number, devices in ((giver, gives), (taker, takes))
    }
    return place.put(changed)


def leavings(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """One stage without a half of its devices, a node's or every second one, or with devices that nobody uses.

    And one stage's devices node by node, or one of every node in turn: then its sums go between nodes at every step.
    """
    for place in taken_apart:
        for number, stage in enumerate(place.stages):
            devices, nodes = stage.devices, _by_node(stage.devices)
            half = len(devices) // 2
            kept = [devices[:half], devices[half:], devices[::2]] if half else []
            if len(nodes) > 1:
                kept += [tuple(one for one in devices if one.node != node) for node in list(nodes)[:MOST_NODES]]
            joined = [
                (*devices, *some[:count])
                for some in _by_node(place.free).values()
                for count in _counts(some, stage.most_tensor)
            ]
            turns = [_in_turn(nodes), tuple(one for some in nodes.values() for one in some)] if len(nodes) > 1 else []
            for chosen in dict.fromkeys((*turns, *kept, *joined[:MOST_NODES])):
                if chosen != devices:
                    yield partial(_on, place, number, chosen)


def _by_node(devices: Sequence[Device]) -> dict[str, tuple[Device, ...]]:
    found: dict[str, tuple[Device, ...]] = {}
    for device in devices:
        found[device.node] = (*found.get(device.node, ()), device)
    return found


def _counts(some: Sequence[Device], step: int) -> Iterator[int]:
    """All of a node's devices, and as few as a stage can take."""
    yield from dict.fromkeys(count for count in (len(some) // step * step, step) if 0 < count <= len(some))


def _in_turn(nodes: dict[str, tuple[Device, ...]]) -> tuple[Device, ...]:
    most = max(map(len, nodes.values()))
    return tuple(some[slot] for slot in range(most) for some in nodes.values() if slot < len(some))


def _on(place: Place, number: int, devices: tuple[Device, ...]) -> Plan:
    return place.put({number: place.stages[number].on(devices, place.rows)})


def _swapped(place: Place, first: int, second: int) -> Plan:
    one, other = place.stages[first], place.stages[second]
    return place.put({first: other, second: one})
