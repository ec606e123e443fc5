"""What a stage on whole devices does behind its last backward: gradients summed, weights updated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.sums import all_reduce_seconds

_SAFE = 1 - 1e-6


def behind_seconds(shares: Shares, micro_batches: int) -> tuple[Array, Array]:
    """Two of [way, stage, kind] least seconds of one layer behind its stage's last backward.

    The second may have (1 - hidden) of the stage's last backward taken off: so much of the sums is hidden there at most.
    """
    problem, terms, ways = shares.problem, shares.terms, shares.ways
    runtime, model = problem.runtime, problem.model
    grad, weight = problem.setting.gradient_dtype.num_bytes, model.dtype.num_bytes
    hidden = min(runtime.overlap_slowdown_ratio - 1, 1.0)
    first: list[Array] = []
    second: list[Array] = []
    for way, degree in enumerate(ways.degrees):
        replicas = np.maximum(shares.size // degree, 1)[:, None]
        message = all_reduce_seconds(terms, ways, shares.counts, way)[:, None] * shares.summed_values[None, :]
        update = np.where((shares.counts > 0)[:, :, None], ways.update[way][None], np.inf).min(axis=1)
        plain = message * grad
        gathered = message * min(weight / 2, hidden * weight * micro_batches)
        scattered = message * grad / 2
        for table, summed in ((first, hidden * scattered), (second, scattered)):
            whole = plain * hidden if runtime.overlaps_gradients and table is first else plain
            table.append(np.minimum(whole + update, summed + gathered + update / replicas))
    return np.stack(first), np.stack(second)


def shared_seconds(shares: Shares, *, apart: bool = False) -> Array:
    """[stage] least seconds of summing weights that it holds as first of several stages, over their owners.

    Apart: where no other of those stages has a node of it. Only weights that the first and the last layer hold, so that several stages always have them apart.
    """
    problem, terms = shares.problem, shares.terms
    setting, kinds = problem.setting, problem.model.kinds
    ends = kinds[int(terms.kind_of[0])], kinds[int(terms.kind_of[-1])]
    name = ends[0].shared_weight
    found = np.zeros(len(shares.counts))
    if name is None or ends[1].shared_weight != name or len(terms.kind_of) == 1:
        return found
    reach, rates, ratio = terms.options.reach, terms.ring_rates, problem.runtime.link_ratio
    near = max((one.inside for one in reach if one.group > 1), default=0.0) * ratio
    if len(rates) > 2:
        between = np.where(shares.counts > 0, [one.between * ratio for one in reach], 0.0).max(axis=1)
        far = np.minimum(between, rates[2])
        rate = far if apart or max(one.group for one in reach) == 1 else np.maximum(near, far)
    elif near > 0:
        rate = np.full(len(found), near)
    else:
        return found
    found[:] = np.inf
    for degree in shares.ways.degrees:
        fits: NDArray[np.bool_] = shares.size % degree == 0
        size = setting.shared_at(ends[0], degree) * setting.gradient_dtype.num_bytes
        found = np.where(fits, np.minimum(found, size * _SAFE / rate), found)
    return found
