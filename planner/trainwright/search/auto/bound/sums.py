"""What sums over the replicas of a stage take on the best links that its devices may have."""

from __future__ import annotations

import numpy as np

from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import Counts, Ways


def fewest_nodes(terms: Terms, counts: Counts) -> Counts:
    """[stage] nodes that it spans at least: a node has devices of one accelerator."""
    groups = np.array([reach.group for reach in terms.options.reach])
    found: Counts = (-(-counts // groups)).sum(axis=1)
    return found


def all_reduce_seconds(terms: Terms, ways: Ways, counts: Counts, way: int) -> Array:
    """[stage] least seconds for each byte of a layer's whole gradients, summed over the replicas of this degree.

    Inside a node a ring moves 2 (d - 1) / d of a rank's part, which is 1/t of all. Between c nodes, every node holding
    whole replicas, what crosses a card is all of it, flat or nested: 2 (c - 1) / c at the rate at which c nodes can be
    connected. Where some tensor groups cross nodes, some group of ranks does with 1/t; where all of them do, each group of
    ranks may be in one node.
    """
    degree, size = ways.degrees[way], counts.sum(axis=1)
    ratio, reach = terms.problem.runtime.link_ratio, terms.options.reach
    inside = np.array([one.inside if one.group > 1 else 0.0 for one in reach]) * ratio
    best = np.where(counts > 0, inside, 0.0).max(axis=1)
    replicas = np.maximum(size / degree, 1.0)
    nodes, rates = fewest_nodes(terms, counts), terms.ring_rates
    moved = 2 * (replicas - 1) / replicas
    near = moved / np.maximum(degree * best, 1e-300)
    if len(rates) <= 2:
        return np.where(replicas > 1, near, 0.0)
    between = np.where(counts > 0, [one.between * ratio for one in reach], np.inf).min(axis=1)
    if ways.crosses[way]:
        found = np.minimum(near, 1 / (degree * rates[2]))
    else:
        spanned = np.clip(nodes, 2, len(rates) - 1)
        rate = np.minimum(rates[spanned], between)
        far = 2 * (spanned - 1) / spanned / rate if degree == 1 else 1 / (degree * np.minimum(rates[2], between))
        lone = np.array([one.devices == one.group for one in reach])
        single = (nodes == 1) & (np.where(counts > 0, lone, True).all(axis=1))
        found = np.where(single, near, np.where(nodes == 1, np.minimum(near, far), far))
    return np.where(replicas > 1, found, 0.0)


def across_rates(terms: Terms, counts: Counts) -> tuple[Array, Array]:
    """Two of [stage] bytes per second, at best, of sums over several pipelines.

    The second where none of the others has a device of the stage's nodes.
    """
    reach, rates, ratio = terms.options.reach, terms.ring_rates, terms.problem.runtime.link_ratio
    far = float(rates[2]) if len(rates) > 2 else 0.0
    near = max((one.inside for one in reach if one.group > 1), default=0.0) * ratio
    between = np.where(counts > 0, [one.between * ratio for one in reach], 0.0).max(axis=1)
    apart = np.minimum(between, far) if far else np.full(len(between), near)
    return (apart if all(one.group == 1 for one in reach) else np.maximum(apart, near)), apart
