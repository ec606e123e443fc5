"""What sums over the replicas of a stage take on the best links that its devices may have."""

from __future__ import annotations

import numpy as np

from trainwright.search.auto.bound.options import Array
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


def owned_values(problem: Problem, degree: int) -> Array:
    """[kind] values on one rank of a weight that several layers share, whose sum counts once: as the first one's of them.

    Where other layers are of its kind, too, they do not count.
    """
    setting, model = problem.setting, problem.model
    owners = [
        model.kind_of(layer) for layer in setting.first_owner.values() if model.layers.count(model.layers[layer]) == 1
    ]
    return np.array([float(kind in owners) * setting.shared_at(kind, degree) for kind in model.kinds])


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


def card_of(terms: Terms) -> Array:
    """[accelerator] bytes per second of the best card of its nodes."""
    found: Array = np.array([one.card for one in terms.options.reach]) * terms.problem.runtime.link_ratio
    return found


def inside_of(terms: Terms) -> Array:
    """[accelerator] bytes per second at best inside a node; 0 where that has but one device."""
    inside = [one.inside if one.group > 1 else 0.0 for one in terms.options.reach]
    found: Array = np.array(inside) * terms.problem.runtime.link_ratio
    return found


def all_reduce_seconds(terms: Terms, ways: Ways, counts: Counts, way: int) -> Array:
    """[stage] least seconds for each byte of a layer's whole gradients, summed over the replicas of this degree.

    A ring of d replicas moves 2 (d - 1) / d of a rank's part, which is 1/t of all, over each of its edges; a nested sum goes
    inside some node, and moves 2 (c - 1) / c of it between c nodes, at the rate at which c nodes can be connected.

    Where not all tensor groups cross nodes, one of them is in a node of g devices. Then of the t slices all but
    (g - t) / (d - 1), which may be there alone, go over its card. Where all cross, each slice may be in one node, as long as
    that has d devices.
    """
    degree, reach, rates = ways.degrees[way], terms.options.reach, terms.ring_rates
    replicas = np.maximum(counts.sum(axis=1) / degree, 1.0)
    best = np.where(counts > 0, inside_of(terms), 0.0).max(axis=1)
    moved = 2 * (replicas - 1) / replicas
    near = moved / np.maximum(degree * best, 1e-300)
    if len(rates) <= 2:
        return np.where(replicas > 1, near, 0.0)
    nodes, group = fewest_nodes(terms, counts), np.minimum([one.group for one in reach], counts).max(axis=1)
    spanned = nodes if degree == 1 else np.ceil(replicas / group).astype(np.intp)
    spanned = np.clip(spanned, 2, len(rates) - 1)
    card = np.where(counts > 0, card_of(terms), 0.0).max(axis=1)
    if ways.crosses[way]:
        slowest = 1 / (degree * rates[spanned])
        may_be_in_one = replicas <= group
    else:
        slowest = 1 / (degree * np.minimum(rates[spanned], np.where(counts > 0, between_of(terms), np.inf).min(axis=1)))
        inside = (group - degree) // np.maximum(replicas - 1, 1)
        slowest = np.maximum(slowest, np.maximum(degree - np.maximum(inside, 0), 0) / degree / card)
        may_be_in_one = nodes == 1
    far = _over_nodes(near, moved, slowest, spanned, _crowded(terms, counts, replicas, near, moved / (degree * card)))
    lone = np.array([one.devices == one.group for one in reach])
    single = (nodes == 1) & np.where(counts > 0, lone, True).all(axis=1) & (not ways.crosses[way])
    found = np.where(single, near, np.where(may_be_in_one, np.minimum(near, far), far))
    return np.where(replicas > 1, found, 0.0)


def _over_nodes(near: Array, moved: Array, slowest: Array, spanned: Counts, crowded: Array) -> Array:
    """[stage] seconds of the better of a flat ring over several nodes and a nested sum, by seconds of a byte between them."""
    nested = near / np.maximum(moved, 1e-300) + 2 * (spanned - 1) / spanned * slowest
    found: Array = np.minimum(np.maximum(moved * slowest, crowded), nested)
    return found


def _crowded(terms: Terms, counts: Counts, replicas: Array, near: Array, edge: Array) -> Array:
    """[stage] least seconds of a flat ring where some node has several replicas, or else nothing.

    It goes from one of them to the other, or from each of them over the node's card, which takes so much for every edge.
    """
    crowd = np.ceil(replicas / most_nodes(terms, counts))
    return np.where(crowd > 1, np.minimum(near, crowd * edge), 0.0)


def across_rates(terms: Terms, counts: Counts) -> tuple[Array, Array]:
    """Two of [stage] bytes per second, at best, of sums over several pipelines.

    The second where none of the others has a device of the stage's nodes.
    """
    rates, near = terms.ring_rates, float(inside_of(terms).max())
    far = float(rates[2]) if len(rates) > 2 else 0.0
    between = np.where(counts > 0, between_of(terms), 0.0).max(axis=1)
    apart = np.minimum(between, far) if far else np.full(len(between), near)
    return (apart if all(one.group == 1 for one in terms.options.reach) else np.maximum(apart, near)), apart
