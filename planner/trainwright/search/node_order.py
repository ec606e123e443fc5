"""The order in which searches lay ranks over nodes: the same whatever the nodes are called and however they are listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from trainwright.cluster import Device, Node
from trainwright.cost.links import Links, links_of
from trainwright.search.protocol import Problem


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
    cluster = problem.cluster
    used = set(problem.nodes)
    numbers = [number for number, node in enumerate(cluster.nodes) if node.name in used]
    accelerators = {cluster.nodes[number].accelerator for number in numbers}
    speeds = {name: _model_seconds(problem, name) for name in sorted(accelerators)}
    names = tuple(sorted(speeds, key=lambda name: (speeds[name], name)))

    def rank(number: int) -> tuple[int, int]:
        node = cluster.nodes[number]
        return names.index(node.accelerator), -node.devices

    links = links_of(cluster)
    ordered: list[Node] = []
    positions: list[int] = []
    for _, alike in groupby(sorted(numbers, key=rank), key=rank):
        for number in _chain(list(alike), links, numbers):
            ordered.append(cluster.nodes[number])
            positions.append(number)
    counts = [node.devices for node in ordered]
    return DeviceOrder(
        tuple(Device(node.name, slot) for node in ordered for slot in range(node.devices)),
        np.repeat(np.array(positions, dtype=np.intp), counts),
        np.repeat(np.array([names.index(node.accelerator) for node in ordered], dtype=np.intp), counts),
        names,
    )


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
