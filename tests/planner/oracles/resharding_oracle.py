"""Element-wise simulation of resharding messages, and lower bounds on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.resharding import MessagePlan, ShardedTensor
from trainwright.resharding.boxes import Box

Memory = dict[Device, NDArray[np.float64]]
"""Each device's copy of the full tensor, NaN for elements that it does not hold."""


def region(box: Box) -> tuple[slice, ...]:
    """Return the tile as an array index."""
    return tuple(slice(first, end) for first, end in box)


def loaded(sharded: ShardedTensor, devices: Sequence[Device], values: NDArray[np.float64]) -> Memory:
    """Return the devices' memories under the tensor's layout."""
    memory = {device: np.full(sharded.shape, np.nan) for device in devices}
    for tile in sharded.tiles:
        for device in tile.holders:
            memory[device][region(tile.box)] = values[region(tile.box)]
    return memory


def play(plan: MessagePlan, memory: Memory) -> Memory:
    """Return the devices' memories after the plan. Raises AssertionError if a device sends what it does not hold."""
    for one in plan.rounds:
        before = {device: held.copy() for device, held in memory.items()}
        for send in one.sends:
            moved = before[send.source][region(send.slice)]
            assert not np.isnan(moved).any(), f"{send.source} sends what it does not hold"
            assert send.source != send.target
            memory[send.target][region(send.slice)] = moved
        for gather in one.gathers:
            for part in gather.parts:
                for box in part.slices:
                    moved = before[part.device][region(box)]
                    assert not np.isnan(moved).any(), f"{part.device} brings what it does not hold"
                    for member in gather.parts:
                        memory[member.device][region(box)] = moved
    return memory


def least_crossing(source: ShardedTensor, target: ShardedTensor, *, relays: bool) -> int:
    """Return the minimum number of elements that any messages must send between nodes.

    For every value by itself, over all sets of devices that can have come to hold it: a message gives it to one more
    device, and costs 1 between nodes, else 0. Without relays only those who held it at first may send. Devices that do
    not want it are no help: on its node one that does can stand in for them.
    """
    holders, wanting = _by_value(source), _by_value(target)
    return sum(_least(holders[index], wanting[index], relays) for index in holders)


def _by_value(sharded: ShardedTensor) -> dict[tuple[int, ...], frozenset[Device]]:
    found = {}
    for tile in sharded.tiles:
        for index in product(*(range(first, end) for first, end in tile.box)):
            found[index] = frozenset(tile.holders)
    return found


@cache
def _least(holders: frozenset[Device], wanting: frozenset[Device], relays: bool) -> int:
    spent = {holders: 0}
    queue = deque([holders])
    while queue:
        held = queue.popleft()
        for sender in held if relays else holders:
            for receiver in wanting - held:
                costs = spent[held] + (sender.node != receiver.node)
                after = held | {receiver}
                if costs < spent.get(after, 10**9):
                    spent[after] = costs
                    (queue.append if sender.node != receiver.node else queue.appendleft)(after)
    return min(costs for held, costs in spent.items() if wanting <= held)


def least_busiest(
    jobs: Sequence[tuple[Sequence[str], str, int]],
    out_rates: Mapping[str, float],
    pair_rates: Mapping[tuple[str, str], float] | None = None,
) -> float:
    """Return the minimum seconds of the busiest NIC over all assignments of the jobs' elements to senders.

    A job is (possible sending nodes, receiving node, values); a NIC sends and receives at the same rate.
    """
    pairs = pair_rates or {}
    best = float("inf")
    for dealt in product(*(combinations_with_replacement(nodes, size) for nodes, _, size in jobs)):
        edges: dict[tuple[str, str], int] = {}
        for (_, target, _), senders in zip(jobs, dealt, strict=True):
            for node in senders:
                edges[node, target] = edges.get((node, target), 0) + 1
        seconds = [count / pairs[edge] for edge, count in edges.items() if edge in pairs]
        for node, rate in out_rates.items():
            seconds.append(sum(count for (source, _), count in edges.items() if source == node) / rate)
            seconds.append(sum(count for (_, target), count in edges.items() if target == node) / rate)
        best = min(best, max(seconds))
    return best
