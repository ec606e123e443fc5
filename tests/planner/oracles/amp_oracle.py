"""Reference of AMP's layer assignment (§3.5, Eq. 6–8): the paper's O(k L⁴) table, and enumeration."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def objective(times: Array, exchanges: Array, micro_batches: int, ends: tuple[int, ...]) -> float:
    """Eq. 5."""
    taken = [float(times[i, first, end]) for i, (first, end) in enumerate(zip((0, *ends), ends, strict=False))]
    if np.isinf(max(taken)):
        return float("inf")
    return (micro_batches - 1) * max(taken) + sum(taken) + sum(float(exchanges[i, e]) for i, e in enumerate(ends[:-1]))


def try_everything(times: Array, exchanges: Array, micro_batches: int) -> float:
    """Return the minimum of Eq. 5 over all assignments; infinite if none is allowed."""
    stages, size, _ = times.shape
    return min(
        (
            objective(times, exchanges, micro_batches, (*cuts, size - 1))
            for cuts in combinations(range(1, size - 1), stages - 1)
        ),
        default=float("inf"),
    )


def plain_table(times: Array, exchanges: Array, micro_batches: int) -> tuple[int, ...] | None:
    """Fill the table dp[i][j][m] cell by cell; m is 0 or any possible stage time.

    Eq. 7 for one stage; Eq. 8 for more: the last cut i' looks at dp[i'][j - 1][max(t_2, m)].
    """
    stages, size, _ = times.shape
    repeats = micro_batches - 1
    tolerances = [0.0, *np.unique(times[np.isfinite(times)]).tolist()]
    number = {tolerance: index for index, tolerance in enumerate(tolerances)}
    cost = np.full((size, stages, len(tolerances)), np.inf)
    cut = np.zeros((size, stages, len(tolerances)), dtype=int)
    for end in range(1, size):
        for m, tolerance in enumerate(tolerances):
            first = float(times[0, 0, end])
            cost[end, 0, m] = repeats * max(0.0, first - tolerance) + first
    for stage in range(1, stages):
        for end in range(stage + 1, size):
            for m, tolerance in enumerate(tolerances):
                for before in range(stage, end):
                    last = float(times[stage, before, end])
                    if np.isinf(last):
                        continue
                    total = cost[before, stage - 1, number[max(last, tolerance)]]
                    total += repeats * max(0.0, last - tolerance) + last + exchanges[stage - 1, before]
                    if total < cost[end, stage, m]:
                        cost[end, stage, m], cut[end, stage, m] = total, before
    return _ends(times, cost, cut, tolerances, number)


def _ends(
    times: Array, cost: Array, cut: NDArray[np.int_], tolerances: list[float], number: dict[float, int]
) -> tuple[int, ...] | None:
    end, m = len(cost) - 1, 0
    if np.isinf(cost[end, -1, 0]):
        return None
    ends = [end]
    for stage in range(cost.shape[1] - 1, 0, -1):
        before = int(cut[end, stage, m])
        m = number[max(float(times[stage, before, end]), tolerances[m])]
        end = before
        ends.append(end)
    return tuple(reversed(ends))
