"""What sums over the replicas of a stage take on the best links that its devices may have."""

from __future__ import annotations

import numpy as np

from trainwright.search.auto.bound.options import Array, used_nodes
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import Counts, Ways
from trainwright.search.protocol import Problem


def seen_share(problem: Problem) -> float:
    """Of a sum beside computing: the share by which both take longer for it."""
    return min(problem.runtime.overlap_slowdown_ratio - 1, 1.0)


def shared_values(problem: Problem, degree: int) -> int:
    """Values on one rank, at least, of a weight that the first and the last layer share; 0 where they share none."""
    setting, model = problem.setting, problem.model
    name = model.kind_of(0).shared_weight
    if len(model.layers) == 1 or name is None or model.kind_of(len(model.layers) - 1).shared_weight != name:
        return 0
    return min(setting.shared_at(kind, degree) for kind in model.kinds if kind.shared_weight == name)


def best_card(problem: Problem) -> float:
    """Bytes per second of the best card; infinite where there is but one node."""
    cluster = problem.cluster
    ports = [cluster.nodes[index].network for index in used_nodes(problem)]
    found = [port.bandwidth_bytes_per_second for port in ports if port is not None]
    found += [link.bandwidth_bytes_per_second for link in cluster.links if link.source != link.target]
    return max(found, default=np.inf) * problem.runtime.link_ratio


def fewest_nodes(terms: Terms, counts: Counts) -> Counts:
    """[stage] nodes that it spans at least: a node has devices of one accelerator."""
    groups = np.array([reach.group for reach in terms.options.reach])
    found: Counts = (-(-counts // groups)).sum(axis=1)
    return found


def most_nodes(terms: Terms, counts: Counts) -> Counts:
    """[stage] nodes that it spans at most."""
    found: Counts = np.minimum(counts, np.array([reach.nodes for reach in terms.options.reach])).sum(axis=1)
    return found


def between_of(terms: Terms) -> Array:
    """[accelerator] bytes per second at best between nodes."""
    found: Array = np.array([one.between for one in terms.options.reach]) * terms.problem.runtime.link_ratio
    return found


def inside_of(terms: Terms) -> Array:
    """[accelerator] bytes per second at best inside a node; 0 where that has but one device."""
    inside = [one.inside if one.group > 1 else 0.0 for one in terms.options.reach]
    found: Array = np.array(inside) * terms.problem.runtime.link_ratio
    return found


def _crowded(terms: Terms, inside: Array, between: Array, moved: Array, card: Array) -> Array:
    """[stage] least seconds for each byte where some node has several replicas.

    A nested sum goes inside that node, too. A flat ring goes from one of them to the other, or twice over the node's card
    (where nodes have cards, and not links of their own to each other).
    `inside` are seconds of the whole ring on the best link inside a node, `between` of one between nodes; `moved` is the
    share of the message that goes over each edge of a ring, `card` the bytes per second of the best card.
    """
    has_cards = not any(link.source != link.target for link in terms.problem.cluster.links)
    flat = np.minimum(inside, (1 + has_cards) * moved / card)
    found: Array = np.minimum(inside / np.maximum(moved, 1e-300) + between, flat)
    return found


def all_reduce_seconds(terms: Terms, ways: Ways, counts: Counts, way: int) -> Array:
    """[stage] least seconds for each byte of a layer's whole gradients, summed over the replicas of this degree.

    Inside a node a ring moves 2 (d - 1) / d of a rank's part, which is 1/t of all. Between c nodes, every node holding
    whole replicas, what crosses a card is all of it, flat or nested: 2 (c - 1) / c at the rate at which c nodes can be
    connected. Where some tensor groups cross nodes, some group of ranks does with 1/t; where all of them do, each group of
    ranks may be in one node.
    """
    degree, size = ways.degrees[way], counts.sum(axis=1)
    best = np.where(counts > 0, inside_of(terms), 0.0).max(axis=1)
    replicas = np.maximum(size / degree, 1.0)
    nodes, rates = fewest_nodes(terms, counts), terms.ring_rates
    moved = 2 * (replicas - 1) / replicas
    near = moved / np.maximum(degree * best, 1e-300)
    if len(rates) <= 2:
        return np.where(replicas > 1, near, 0.0)
    between = np.where(counts > 0, between_of(terms), np.inf).min(axis=1)
    if ways.crosses[way]:
        found = np.minimum(near, 1 / (degree * rates[2]))
    else:
        spanned = np.clip(nodes, 2, len(rates) - 1)
        rate = np.minimum(rates[spanned], between)
        far = 2 * (spanned - 1) / spanned / rate if degree == 1 else 1 / (degree * np.minimum(rates[2], between))
        crowded = _crowded(terms, near, far, moved, np.where(counts > 0, between_of(terms), 0.0).max(axis=1) * degree)
        far = np.where(replicas > most_nodes(terms, counts), np.maximum(far, crowded), far)
        lone = np.array([one.devices == one.group for one in terms.options.reach])
        single = (nodes == 1) & (np.where(counts > 0, lone, True).all(axis=1))
        found = np.where(single, near, np.where(nodes == 1, np.minimum(near, far), far))
    return np.where(replicas > 1, found, 0.0)


def across_rates(terms: Terms, counts: Counts) -> tuple[Array, Array]:
    """Two of [stage] bytes per second, at best, of sums over several pipelines.

    The second where none of the others has a device of the stage's nodes.
    """
    rates, near = terms.ring_rates, float(inside_of(terms).max())
    far = float(rates[2]) if len(rates) > 2 else 0.0
    between = np.where(counts > 0, between_of(terms), 0.0).max(axis=1)
    apart = np.minimum(between, far) if far else np.full(len(between), near)
    return (apart if all(one.group == 1 for one in terms.options.reach) else np.maximum(apart, near)), apart
