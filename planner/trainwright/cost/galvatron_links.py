"""What groups of devices communicate with: rings that run at the same time, rows that change places, boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.links import links_of
from trainwright.cost.setting import Setting

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

GATHER, ALL_REDUCE = 1, 2
"""How often a message passes its ring: once for a gather or a scatter, twice for an all-reduce."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The slowest of rings that run at the same time."""

    members: int
    bytes_per_second: float
    latency_seconds: float

    def seconds(self, message_bytes: float, passes: int) -> float:
        """Each pass moves (n-1)/n of the message in n-1 steps."""
        if self.members == 1 or message_bytes <= 0:
            return 0.0
        share = (self.members - 1) / self.members
        return passes * (share * message_bytes / self.bytes_per_second + (self.members - 1) * self.latency_seconds)


class GroupLinks:
    """The links between the nodes of some devices; `nodes` is [device] the number of its node."""

    def __init__(self, devices: Sequence[Device], setting: Setting) -> None:
        links = links_of(setting.cluster)
        number = {node.name: index for index, node in enumerate(setting.cluster.nodes)}
        names = list(dict.fromkeys(device.node for device in devices))
        used = np.array([number[name] for name in names])
        place = {name: index for index, name in enumerate(names)}
        self.nodes: Indices = np.array([place[device.node] for device in devices])
        self.bandwidth: Array = links.bandwidth[np.ix_(used, used)] * setting.runtime.link_ratio
        self.latency: Array = links.latency[np.ix_(used, used)]

    @cached_property
    def _between(self) -> Array:
        """[source, target] bandwidth, 0 within a node."""
        between = self.bandwidth.copy()
        np.fill_diagonal(between, 0.0)
        return between

    def slowest_ring(self, groups: Indices) -> Ring:
        """The slowest of the rings over each group's members [group, member] (places among the devices).

        Rings share what a node's card carries, which is the fastest of its links, in each direction by itself.
        """
        count = groups.shape[1]
        if count == 1:
            return Ring(1, np.inf, 0.0)
        target = self.nodes[groups]
        source = np.roll(target, -1, axis=1)
        crosses = source != target
        size = len(self.bandwidth)
        rate = self.bandwidth[source, target]
        if crosses.any():
            sent, received = (np.bincount(ends[crosses], minlength=size) for ends in (source, target))
            out_share = self._between.max(axis=1) / np.maximum(sent, 1)
            in_share = self._between.max(axis=0) / np.maximum(received, 1)
            shared = np.minimum(out_share[source], in_share[target])
            rate = np.where(crosses, np.minimum(rate, shared), rate)
        return Ring(count, float(rate.min()), float(self.latency[source, target].max()))

    def move(self, had: Indices, needed: Indices) -> tuple[float, float]:
        """Latency and seconds for each byte of a row until every device has the rows that it needs.

        What a device lacks comes from its own node where it is there, else over the node's card, which the node's
        devices share. Rows are [device, 2] first and end.
        """
        bounds = np.unique(np.concatenate((had.ravel(), needed.ravel())))
        size, middle = np.diff(bounds), (bounds[:-1] + bounds[1:]) / 2
        has = (had[:, :1] < middle) & (middle < had[:, 1:])
        lacks = (needed[:, :1] < middle) & (middle < needed[:, 1:]) & ~has
        latency = slowest = 0.0
        for node in range(len(self.bandwidth)):
            here = self.nodes == node
            near = has[here].any(axis=0)
            inside, outside = (lacks[here] & near) @ size, (lacks[here] & ~near) @ size
            if inside.any():
                latency = max(latency, float(self.latency[node, node]))
                slowest = max(slowest, float(inside.max() / self.bandwidth[node, node]))
            if outside.any():
                others = np.arange(len(self.bandwidth)) != node
                latency = max(latency, float(self.latency[others, node].max()))
                slowest = max(slowest, float(outside.sum() / self.bandwidth[others, node].min()))
        return latency, slowest


def exchange(upper: Sequence[Device], lower: Sequence[Device], setting: Setting) -> tuple[float, float]:
    """Latency and seconds for each byte of a boundary that crosses between two stages, there and back.

    The slowest link between their nodes carries all of it.
    """
    group = GroupLinks((*upper, *lower), setting)
    above, below = (np.unique(part) for part in (group.nodes[: len(upper)], group.nodes[len(upper) :]))
    there, back = np.ix_(above, below), np.ix_(below, above)
    latency = float(group.latency[there].max() + group.latency[back].max())
    return latency, float(1 / group.bandwidth[there].min() + 1 / group.bandwidth[back].min())
