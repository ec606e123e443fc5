"""The best that devices of one accelerator find on links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.cluster import Cluster
from trainwright.cost.links import links_of
from trainwright.search.protocol import Problem


@dataclass(frozen=True)
class Reach:
    """The best that devices of one accelerator find on links: bytes per second and seconds.

    Attributes:
        accelerator: its name.
        nodes: with devices of it.
        group: most devices of it in one node.
        inside, inside_latency: between devices of one such node; (infinite, 0) where nodes have one device.
        between, between_latency: to any other node, in the better direction.
        card: what a node sends, or takes in, at once; infinite where it is the only one.
    """

    accelerator: str
    nodes: int
    devices: int
    group: int
    inside: float
    inside_latency: float
    between: float
    between_latency: float
    card: float

    def all_reduce(self, tensor: int, *, crosses: bool, ratio: float) -> tuple[float, float]:
        """Least latency and least seconds per byte of an all-reduce, flat or nested, over so many ranks.

        `ratio`: of these bandwidths the runtime reaches so much.
        """
        inside, between = 1 / (self.inside * ratio), 1 / (self.between * ratio)
        moved = 2 * (tensor - 1) / tensor
        if not crosses:
            return 2 * (tensor - 1) * self.inside_latency, moved * inside
        nodes = range(max(2, -(-tensor // self.group)), tensor + 1)
        # A node of a mixed group may have more devices than those of this accelerator, so their own part is left out.
        nested = min(2 * (count - 1) / count * between for count in nodes) if nodes else moved * between
        return 2 * min(self.between_latency, self.inside_latency), min(moved * between, nested, between)


def _cards(cluster: Cluster) -> dict[str, float]:
    """By name of a node: bytes per second of its card, which is as good as the best of its links."""
    found = {node.name: node.network.bandwidth_bytes_per_second if node.network else 0.0 for node in cluster.nodes}
    for link in cluster.links:
        for name in {link.source, link.target} if link.source != link.target else ():
            found[name] = max(found[name], link.bandwidth_bytes_per_second)
    return {name: rate or np.inf for name, rate in found.items()}


def reach_of(problem: Problem, pools: Sequence[Sequence[int]]) -> tuple[Reach, ...]:
    """Of pools of nodes with one accelerator, which are all nodes together."""
    cluster = problem.cluster
    links, cards = links_of(cluster), _cards(cluster)
    everyone = np.array([index for them in pools for index in them], dtype=np.intp)
    found = []
    for them in pools:
        mine = np.array(them, dtype=np.intp)
        several = [index for index in them if cluster.nodes[index].devices > 1]
        inside = links.bandwidth[several, several].max(initial=1.0) if several else np.inf
        latency = links.latency[several, several].min(initial=np.inf) if several else 0.0
        out, back = np.ix_(mine, everyone), np.ix_(everyone, mine)
        apart = mine[:, None] != everyone[None, :]
        rates = np.maximum(links.bandwidth[out], links.bandwidth[back].T)[apart]
        late = np.minimum(links.latency[out], links.latency[back].T)[apart]
        reach = Reach(
            cluster.nodes[them[0]].accelerator,
            len(them),
            sum(cluster.nodes[index].devices for index in them),
            max(cluster.nodes[index].devices for index in them),
            float(inside),
            float(latency),
            float(rates.max(initial=1.0)) if rates.size else np.inf,
            float(late.min()) if late.size else 0.0,
            max(cards[cluster.nodes[index].name] for index in them),
        )
        found.append(reach)
    return tuple(found)
