"""Algorithm 2's way from the memory-balanced partition towards the time-balanced one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trainwright.search.galvatron.balance import neighbours
from trainwright.search.galvatron.pipelines import Cut, Ends, PipelineSolution

_ROUNDING = 1e-12


def adjusted(cut: Cut, memory_balanced: Ends, time_balanced: Ends | None) -> Iterator[PipelineSolution]:
    """Solutions of every partition in the queue: the slowest stage gives a boundary layer to a neighbour.

    A new partition is followed where (1) no stage takes longer than the slowest did, (2) all fit into memory and
    (3) none holds more than the fullest stage under p_t.
    """
    fullest = _fullest(cut.solution(time_balanced) if time_balanced else None)
    queue, seen = deque([memory_balanced]), {memory_balanced}
    while queue:
        solution = cut.solution(queue.popleft())
        if solution is None:
            continue
        yield solution
        for ends in _relieved(solution):
            if ends in seen:
                continue
            seen.add(ends)
            new = cut.solution(ends)
            if new is not None and _is_valid(new, solution, fullest):
                queue.append(ends)


def _slowest(solution: PipelineSolution) -> int:
    seconds = [stage.steady_seconds for stage in solution.stages]
    return seconds.index(max(seconds))


def _relieved(solution: PipelineSolution) -> list[Ends]:
    """Partitions in which the slowest stage has one layer less."""
    slowest = _slowest(solution)
    held = _layers(solution.ends)
    return [ends for ends in neighbours(solution.ends) if _layers(ends)[slowest] < held[slowest]]


def _layers(ends: Ends) -> list[int]:
    return [end - first for first, end in zip((0, *ends), ends, strict=False)]


def _fullest(solution: PipelineSolution | None) -> float | None:
    return max(stage.bytes for stage in solution.stages) if solution else None


def _is_valid(new: PipelineSolution, old: PipelineSolution, fullest: float | None) -> bool:
    longest = max(stage.steady_seconds for stage in old.stages)
    return all(stage.steady_seconds <= longest * (1 + _ROUNDING) for stage in new.stages) and (
        fullest is None or all(stage.bytes <= fullest for stage in new.stages)
    )


def descended(cut: Cut, start: PipelineSolution, steps: int) -> PipelineSolution:
    """The best partition reached by moving single boundary layers for as long as Eq. 8 falls, at most `steps` times."""
    best = start
    for _ in range(steps):
        tried = [solution for ends in neighbours(best.ends) if (solution := cut.solution(ends)) is not None]
        better = min(tried, key=lambda solution: solution.seconds, default=best)
        if better.seconds >= best.seconds * (1 - _ROUNDING):
            break
        best = better
    return best
