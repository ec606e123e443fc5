"""The order in which searches lay ranks over nodes: the same whatever the nodes are called and however they are listed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, permutations

import numpy as np

from trainwright.cluster import Device
from trainwright.cost.links import Links, links_of, node_classes
from trainwright.search.protocol import Problem
from trainwright.search.relisting import relisted


@dataclass(frozen=True, eq=False)
class DeviceOrder:
    """The devices that plans may use, in the order of their ranks.

    Attributes:
        nodes: [device] the number of its node in the cluster.
        accelerators: [device] the number of its accelerator in `names`.
    """

    devices: tuple[Device, ...]
    nodes: np.ndarray[tuple[int], np.dtype[np.intp]]
    accelerators: np.ndarray[tuple[int], np.dtype[np.intp]]
    names: tuple[str, ...]


def device_order(problem: Problem) -> DeviceOrder:
    """Nodes with the fastest accelerator first, among those the larger ones, among those neighbours by their links.

    Megatron takes nodes as its host file lists them, which may be in any order; here equal accelerators stand
    together, so that as few groups as possible mix them.
    """
    return _laid_out(problem, [number for group in _groups(problem) for number in group])


def device_orders(problem: Problem, most: int) -> list[DeviceOrder]:
    """Orders that are worth a try, `device_order` first: at most so many.

    Every order of the nodes that is not the same but for interchangeable nodes, where there are no more than `most`
    of them; else every order of the groups of equal nodes; else the first alone.
    """
    groups = _groups(problem)
    first = [number for group in groups for number in group]
    classes = node_classes(problem.cluster)
    counts = Counter(classes[number] for number in first)
    orders = [first]
    if math.factorial(len(first)) // math.prod(math.factorial(count) for count in counts.values()) <= most:
        orders += [_with_classes(list(order), first, classes) for order in _arrangements(counts)]
    elif math.factorial(len(groups)) <= most:
        orders += [[number for group in order for number in group] for order in permutations(groups)]
    return [_laid_out(problem, list(order)) for order in dict.fromkeys(tuple(order) for order in orders)]


def _arrangements(counts: Counter[int]) -> Iterator[tuple[int, ...]]:
    """Every sequence that names each class so often, ascending."""
    order = sorted(counts.elements())
    while True:
        yield tuple(order)
        rising = [index for index in range(len(order) - 1) if order[index] < order[index + 1]]
        if not rising:
            return
        pivot = rising[-1]
        larger = max(index for index in range(pivot + 1, len(order)) if order[index] > order[pivot])
        order[pivot], order[larger] = order[larger], order[pivot]
        order[pivot + 1 :] = reversed(order[pivot + 1 :])


def _with_classes(order: list[int], first: list[int], classes: tuple[int, ...]) -> list[int]:
    """Nodes in an order of classes; those of one class as they stand in the first order."""
    left: dict[int, list[int]] = {}
    for number in first:
        left.setdefault(classes[number], []).append(number)
    return [left[name].pop(0) for name in order]


def _groups(problem: Problem) -> list[list[int]]:
    """Numbers of the nodes in use: groups of equal accelerators and sizes, the fastest and largest first."""
    cluster = problem.cluster
    used = set(problem.nodes)
    number_of = {node.name: number for number, node in enumerate(cluster.nodes)}
    numbers = [number_of[node.name] for node in relisted(cluster).nodes if node.name in used]
    names = _by_speed(problem)

    def rank(number: int) -> tuple[int, int]:
        node = cluster.nodes[number]
        return names.index(node.accelerator), -node.devices

    links = links_of(cluster)
    return [list(_chain(list(alike), links, numbers)) for _, alike in groupby(sorted(numbers, key=rank), key=rank)]


def _laid_out(problem: Problem, numbers: list[int]) -> DeviceOrder:
    names = _by_speed(problem)
    nodes = [problem.cluster.nodes[number] for number in numbers]
    counts = [node.devices for node in nodes]
    return DeviceOrder(
        tuple(Device(node.name, slot) for node in nodes for slot in range(node.devices)),
        np.repeat(np.array(numbers, dtype=np.intp), counts),
        np.repeat(np.array([names.index(node.accelerator) for node in nodes], dtype=np.intp), counts),
        names,
    )


def _by_speed(problem: Problem) -> tuple[str, ...]:
    """Names of the accelerators in use, the fastest first."""
    names = {problem.cluster.node(name).accelerator for name in problem.nodes}
    return tuple(sorted(names, key=lambda name: (_model_seconds(problem, name), name)))


def _model_seconds(problem: Problem, accelerator: str) -> float:
    """Seconds of one row through the whole model on one device."""
    costs = {kind.name: problem.setting.layer_cost(accelerator, kind, 1, 1) for kind in problem.model.kinds}
    return sum(costs[kind].forward_seconds + costs[kind].backward_seconds for kind in problem.model.layers)


def _chain(numbers: list[int], links: Links, everyone: list[int]) -> Iterator[int]:
    """From the best connected node on, always the one with the best link to the node before it."""
    mutual = np.minimum(links.bandwidth, links.bandwidth.T)
    connected = np.sort(np.where(np.isfinite(mutual), mutual, 0.0)[np.ix_(numbers, everyone)], axis=1)
    # Best connected first, compared from the best link on; equally connected nodes keep the order given.
    left = [numbers[index] for index in np.lexsort(tuple(-connected.T))]
    while left:
        here = left.pop(0)
        yield here
        if left and not np.all(mutual[here, left] == mutual[here, left[0]]):
            best = int(np.argmax(mutual[here, left]))
            left.insert(0, left.pop(best))
