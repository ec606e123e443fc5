"""Canonical order of nodes and ranks, independent of the nodes' names and listing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, permutations

import numpy as np

from trainwright.cluster import Cluster, Device
from trainwright.cost.network import LinkMatrices, link_matrices, node_classes
from trainwright.layer import WHOLE_LAYER
from trainwright.search.problem import Problem


def canonical_node_order(cluster: Cluster) -> Cluster:
    """Return the cluster with its nodes in an order that depends neither on their names nor on their listing.

    Colour refinement distinguishes nodes first by their devices, then repeatedly by their links to nodes of each colour.
    Nodes of equal colour keep their order, which matters only for clusters of a rare symmetry.
    """
    colours = _dense_ranks([(node.accelerator, node.devices) for node in cluster.nodes])
    classes = len(set(node_classes(cluster)))
    links, previous_colours = link_matrices(cluster), 0
    while previous_colours < len(set(colours)) < classes:
        previous_colours = len(set(colours))
        colours = _dense_ranks([_neighbour_signature(number, colours, links) for number in range(len(colours))])
    order = sorted(range(len(colours)), key=lambda number: (colours[number], number))
    return replace(cluster, nodes=tuple(cluster.nodes[number] for number in order))


def _neighbour_signature(number: int, colours: Sequence[int], links: LinkMatrices) -> tuple[Hashable, ...]:
    columns = [column for table in links.tables for column in (table[number], table[:, number])]
    others = sorted(zip(colours, *(column.tolist() for column in columns), strict=True))
    return colours[number], links.bandwidth[number, number], tuple(others)


def _dense_ranks(keys: Sequence[tuple[Hashable, ...]]) -> list[int]:
    rank_of = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [rank_of[key] for key in keys]


@dataclass(frozen=True, eq=False)
class DeviceOrder:
    """Devices that plans may use, in rank order.

    Attributes:
        node_numbers: `[device]` index of its node in the cluster.
        accelerator_numbers: `[device]` index into `accelerator_names`.
    """

    devices: tuple[Device, ...]
    node_numbers: np.ndarray[tuple[int], np.dtype[np.intp]]
    accelerator_numbers: np.ndarray[tuple[int], np.dtype[np.intp]]
    accelerator_names: tuple[str, ...]


def device_order(problem: Problem) -> DeviceOrder:
    """Return the devices node by node: fastest accelerator first, then larger nodes, then well-connected neighbours.

    Megatron takes nodes in the order of its host file. Here nodes of one accelerator are adjacent, so that few groups mix
    accelerators.
    """
    return _build_device_order(problem, [number for group in _node_groups(problem) for number in group])


def device_orders(problem: Problem, max_orders: int) -> list[DeviceOrder]:
    """Return at most `max_orders` device orders, `device_order` first.

    They are all node orders up to interchangeable nodes, if these are few enough; else all orders of the groups of equal
    nodes, if these are; else the first alone.
    """
    groups = _node_groups(problem)
    default_order = [number for group in groups for number in group]
    classes = node_classes(problem.cluster)
    counts = Counter(classes[number] for number in default_order)
    orders = [default_order]
    if (
        math.factorial(len(default_order)) // math.prod(math.factorial(count) for count in counts.values())
        <= max_orders
    ):
        orders += [_assign_nodes(list(order), default_order, classes) for order in _multiset_permutations(counts)]
    elif math.factorial(len(groups)) <= max_orders:
        orders += [[number for group in order for number in group] for order in permutations(groups)]
    return [_build_device_order(problem, list(order)) for order in dict.fromkeys(tuple(order) for order in orders)]


def _multiset_permutations(counts: Counter[int]) -> Iterator[tuple[int, ...]]:
    """Yield every sequence with `counts[c]` occurrences of each class c, in ascending order."""
    order = sorted(counts.elements())
    while True:
        yield tuple(order)
        ascents = [index for index in range(len(order) - 1) if order[index] < order[index + 1]]
        if not ascents:
            return
        pivot = ascents[-1]
        larger = max(index for index in range(pivot + 1, len(order)) if order[index] > order[pivot])
        order[pivot], order[larger] = order[larger], order[pivot]
        order[pivot + 1 :] = reversed(order[pivot + 1 :])


def _assign_nodes(order: list[int], default_order: list[int], classes: tuple[int, ...]) -> list[int]:
    """Return nodes in an order of classes; nodes of one class keep their default order."""
    unplaced: dict[int, list[int]] = {}
    for number in default_order:
        unplaced.setdefault(classes[number], []).append(number)
    return [unplaced[name].pop(0) for name in order]


def _node_groups(problem: Problem) -> list[list[int]]:
    """Return the numbers of used nodes, grouped by accelerator and size; the fastest and largest group first."""
    cluster = problem.cluster
    used = set(problem.nodes)
    number_of = {node.name: number for number, node in enumerate(cluster.nodes)}
    numbers = [number_of[node.name] for node in canonical_node_order(cluster).nodes if node.name in used]
    names = _accelerators_by_speed(problem)

    def rank(number: int) -> tuple[int, int]:
        node = cluster.nodes[number]
        return names.index(node.accelerator), -node.devices

    links = link_matrices(cluster)
    return [
        list(_chain_by_bandwidth(list(alike), links, numbers))
        for _, alike in groupby(sorted(numbers, key=rank), key=rank)
    ]


def _build_device_order(problem: Problem, numbers: list[int]) -> DeviceOrder:
    names = _accelerators_by_speed(problem)
    nodes = [problem.cluster.nodes[number] for number in numbers]
    counts = [node.devices for node in nodes]
    return DeviceOrder(
        tuple(Device(node.name, slot) for node in nodes for slot in range(node.devices)),
        np.repeat(np.array(numbers, dtype=np.intp), counts),
        np.repeat(np.array([names.index(node.accelerator) for node in nodes], dtype=np.intp), counts),
        names,
    )


def _accelerators_by_speed(problem: Problem) -> tuple[str, ...]:
    """Return the names of the used accelerators, fastest first."""
    names = {problem.cluster.node(name).accelerator for name in problem.nodes}
    return tuple(sorted(names, key=lambda name: (_model_seconds(problem, name), name)))


def _model_seconds(problem: Problem, accelerator: str) -> float:
    """Return the seconds of one row through the unsharded model on one device."""
    costs = {
        kind.name: problem.cost_context.layer_cost(accelerator, kind, WHOLE_LAYER, 1) for kind in problem.model.kinds
    }
    return sum(costs[kind].forward_seconds + costs[kind].backward_seconds for kind in problem.model.layers)


def _chain_by_bandwidth(numbers: list[int], links: LinkMatrices, all_numbers: list[int]) -> Iterator[int]:
    """Yield the best connected node, then repeatedly the node with the best link to the previous one."""
    slower_direction = np.minimum(links.bandwidth, links.bandwidth.T)
    connected = np.sort(
        np.where(np.isfinite(slower_direction), slower_direction, 0.0)[np.ix_(numbers, all_numbers)], axis=1
    )
    # Best connected first, comparing the best links first; equally connected nodes keep their order.
    unplaced = [numbers[index] for index in np.lexsort(tuple(-connected.T))]
    while unplaced:
        current = unplaced.pop(0)
        yield current
        if unplaced and not np.all(slower_direction[current, unplaced] == slower_direction[current, unplaced[0]]):
            best = int(np.argmax(slower_direction[current, unplaced]))
            unplaced.insert(0, unplaced.pop(best))
