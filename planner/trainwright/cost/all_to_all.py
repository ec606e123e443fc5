"""All-to-alls over device groups on their actual links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainwright.cost.collectives import Nodes
from trainwright.cost.network import Network, link_matrices
from trainwright.cost.operators.sharding_specs import LinearSeconds


def all_to_all(groups: Sequence[Nodes], network: Network) -> LinearSeconds:
    """Return the seconds of an all-to-all, by the bytes on each member, which sends one n-th to every other.

    Groups are equally large, have equal bytes and run at once: the slowest message, link or NIC counts. The messages leave
    together, as in gloo and NCCL, so their latencies do not add up.
    """
    size = len(groups[0])
    if size == 1:
        return LinearSeconds()
    number = {node.name: index for index, node in enumerate(network.cluster.nodes)}
    names = list(dict.fromkeys(node for group in groups for node in group))
    members = np.array([[group.count(name) for name in names] for group in groups], dtype=np.float64)
    links, chosen = link_matrices(network.cluster), np.ix_(*[[number[name] for name in names]] * 2)
    inside = np.eye(len(names), dtype=np.bool_)
    messages = np.where(inside, members.max(axis=0) - 1, members.T @ members)
    is_used, ratio = messages > 0, np.where(inside, network.inside_link_ratio, network.link_ratio)
    queued = messages / (links.bandwidth[chosen] * ratio)
    alone = is_used / (links.flow[chosen] * ratio)
    leaving = (members * (size - members)).sum(axis=0)
    cards = network.nic_bandwidths
    shared = [
        count / cards[side, name]
        for name, count in zip(names, leaving, strict=True)
        for side in ("out", "in")
        if (side, name) in cards
    ]
    slowest = max(float(queued.max()), float(alone.max()), *shared, 0.0)
    return LinearSeconds(float(links.latency[chosen][is_used].max()), slowest / size)
