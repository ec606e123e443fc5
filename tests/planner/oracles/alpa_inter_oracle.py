"""Reference of Alpa's inter-operator pass: the paper's algorithm, and full enumeration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

from trainwright.search.alpa.stage_candidates import StageCandidates


class Choice(NamedTuple):
    """Layers first … end - 1 on `size` devices that lie between `low` and `high` + size of the pipeline's devices."""

    first: int
    end: int
    size: int
    low: int
    high: int
    seconds: float
    max_stages: int
    copies: float = 1.0


def choices_of(edges: StageCandidates) -> list[Choice]:
    """Return the candidates as plain values."""
    columns = (
        edges.first,
        edges.end,
        edges.size,
        edges.min_devices_before,
        edges.max_devices_before,
        edges.seconds,
        edges.max_remaining_stages,
        edges.message_copies,
    )
    return [Choice(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class Case(NamedTuple):
    """Input of the stage DP.

    Empty messages cost nothing: `message_bytes[layer]`, and `[direction][devices before]` seconds per byte and latencies.
    """

    choices: Sequence[Choice]
    layers: int
    devices: int
    micro_batches: int
    max_stages: int
    message_bytes: Sequence[float] = ()
    paces: Sequence[Sequence[float]] = ()
    latencies: Sequence[Sequence[float]] = ()

    def times(self, one: Choice, used: int) -> tuple[float, float]:
        """Return the stage's seconds in the sum of Eq. 2, and its lower bound on t_max."""
        if not self.message_bytes:
            return one.seconds, one.seconds
        behind = used + one.size
        there = self.message_bytes[one.first] * one.copies * self.paces[0][used]
        back = self.message_bytes[one.end] * one.copies * self.paces[1][behind]
        late = self.latencies[0][used] + self.latencies[1][behind]
        return one.seconds + there + back + late, max(one.seconds, there, back)


def every_pipeline(case: Case) -> Iterator[tuple[Choice, ...]]:
    """Yield all stage sequences that use every layer and device once, ignoring memory."""

    def behind(layer: int, used: int, left: int) -> Iterator[tuple[Choice, ...]]:
        if layer == case.layers and used == case.devices:
            yield ()
        elif left:
            for one in case.choices:
                if one.first == layer and one.low <= used <= one.high:
                    for rest in behind(one.end, used + one.size, left - 1):
                        yield (one, *rest)

    yield from behind(0, 0, case.max_stages)


def least_seconds(case: Case) -> float:
    """Return T* of Eq. 2 under Eq. 5 by enumeration; infinite if no pipeline fits."""
    best = math.inf
    for stages in every_pipeline(case):
        if all(one.max_stages >= len(stages) - place for place, one in enumerate(stages)):
            places = (0, *accumulate(one.size for one in stages))
            times = [case.times(one, used) for one, used in zip(stages, places, strict=False)]
            total, longest = sum(time for time, _ in times), max(time for _, time in times)
            best = min(best, total + (case.micro_batches - 1) * longest)
    return best


def algorithm_1(case: Case, epsilon: float = 0.0) -> float:
    """Return T* by lines 25–43 of Algorithm 1: every t_max ascending, at least ε apart, with early stop."""
    best, last = math.inf, -math.inf
    every = {case.times(one, used)[1] for one in case.choices for used in range(one.low, one.high + 1)}
    for longest in sorted(every):
        if case.micro_batches * longest >= best:
            break
        if longest - last >= epsilon:
            last = longest
            best = min(best, least_sum(case, longest) + (case.micro_batches - 1) * longest)
    return best


def least_sum(case: Case, longest: float) -> float:
    """Return the minimum of F(s, 0, N · M; t_max) over s, by loops over s, l and d (Eq. 3)."""
    table, best = {(case.layers, case.devices): 0.0}, math.inf
    for stages in range(1, case.max_stages + 1):
        following: dict[tuple[int, int], float] = {}
        for one in case.choices:
            for used in range(one.low, one.high + 1):
                seconds, least = case.times(one, used)
                if least <= longest and one.max_stages >= stages:
                    value = seconds + table.get((one.end, used + one.size), math.inf)
                    if value < following.get((one.first, used), math.inf):
                        following[one.first, used] = value
        table = following
        best = min(best, table.get((0, 0), math.inf))
    return best


def best_clusters(
    flops: Sequence[float], received: Sequence[float], clusters: int, spread: float
) -> tuple[float, float] | None:
    """Return Eq. 6 by enumeration: the minimal largest input of a cluster, and then the least sum of squares."""
    limit = (1 + spread) * sum(flops) / clusters
    found = []
    for cuts in combinations(range(1, len(flops)), clusters - 1):
        bounds = (0, *cuts, len(flops))
        sums = [sum(flops[a:b]) for a, b in pairwise(bounds)]
        if max(sums) <= limit * (1 + 1e-9):
            found.append((max(received[a] for a in bounds[:-1]), sum(one * one for one in sums)))
    return min(found, default=None)
