"""Devices that change their stage, are left out, or stand in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, islice, pairwise

from trainwright.plan import Plan
from trainwright.search.auto.moves.place import MOST_NODES, Devices, Move, Place, by_node
from trainwright.search.auto.setups import Setup

FARTHEST = 4
"""So far from each other are stages that change places."""


def seats(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Devices handed to a neighbouring stage, a half, a quarter or a tensor group; or two stages that change places."""
    for place in taken_apart:
        stages = place.stages
        slower = [max(pair) for pair in pairwise(place.seconds)]
        for number in sorted(range(len(slower)), key=lambda number: -slower[number]):
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


def members(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """One stage without a half of its devices, a node's or every second one, or with devices that nobody uses.

    And one stage's devices node by node, or one of every node in turn: then its sums go between nodes at every step.
    """
    for place in taken_apart:
        spare = place.spare
        for number in place.slowest_first:
            stage = place.stages[number]
            nodes = by_node(stage.devices)
            joined = _with_more(stage, spare)
            for devices in dict.fromkeys((*_in_other_orders(nodes), *_with_less(stage.devices, nodes), *joined)):
                if devices != stage.devices:
                    yield partial(_on, place, number, devices)


def _in_other_orders(nodes: dict[str, Devices]) -> Iterator[Devices]:
    if len(nodes) > 1:
        most = max(map(len, nodes.values()))
        yield tuple(some[slot] for slot in range(most) for some in nodes.values() if slot < len(some))
        yield tuple(device for some in nodes.values() for device in some)


def _with_less(devices: Devices, nodes: dict[str, Devices]) -> Iterator[Devices]:
    if half := len(devices) // 2:
        yield from (devices[:half], devices[half:], devices[::2])
    if len(nodes) > 1:
        for node in islice(nodes, MOST_NODES):
            yield tuple(device for device in devices if device.node != node)


def _with_more(stage: Setup, free: Sequence[Devices]) -> Iterator[Devices]:
    """With all that a node has, and with as few as a stage can take."""
    step = stage.most_tensor
    for some in free:
        for count in dict.fromkeys((len(some) // step * step, step)):
            if 0 < count <= len(some):
                yield (*stage.devices, *some[:count])


def _on(place: Place, number: int, devices: Devices) -> Plan:
    return place.put({number: place.stages[number].on(devices, place.rows)})


def _swapped(place: Place, first: int, second: int) -> Plan:
    one, other = place.stages[first], place.stages[second]
    return place.put({first: other, second: one})
