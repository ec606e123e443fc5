"""The batch size with the best throughput (Galvatron's Algorithm 1, line 2), with any search."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem, Search

STEP = 8
"""Batch sizes are multiples of it, as in the paper's tables."""
LARGEST = 4096
"""No larger batch is tried: gradients of larger ones rarely train better, and throughput hardly grows any more."""
LEAST_GAIN_RATIO = 1.005
"""A batch twice as large is worth the next one only while throughput grows at least so much."""
REFINEMENTS = 8
"""Sizes tried between the best size and its neighbours."""


@dataclass(frozen=True)
class BatchSize:
    """The answer: the size, its candidates best first, and samples per second of every size tried, ascending."""

    global_batch_size: int
    candidates: tuple[Candidate, ...]
    samples_per_second: tuple[tuple[int, float], ...]


def best_batch_size(  # noqa: PLR0913 - a search's arguments and the range
    problem: Problem,
    search: Search,
    control: Control,
    top: int | None = None,
    *,
    step: int = STEP,
    largest: int = LARGEST,
) -> BatchSize:
    """The multiple of `step` up to `largest` with the most samples per second; the problem's own batch size is ignored.

    The paper raises the batch by the step until memory is out. As small micro-batches keep large batches in memory,
    throughput levels off long before: sizes are doubled while that pays, then sizes around the best are tried.
    Raises NoFeasiblePlan where no size fits.
    """
    climb = _Climb(problem, search, control, top)
    size, last = step, 0.0
    while size <= largest:
        throughput = climb.throughput(size)
        if climb.must_end or (last > 0 and throughput < last * LEAST_GAIN_RATIO):
            break
        size, last = 2 * size, throughput
    if climb.best is None:
        raise climb.refusal or NoFeasiblePlan(f"no batch size up to {largest} is a multiple of {step}")
    around = climb.best
    width = max(step, around // REFINEMENTS // step * step)
    for size in range(around // 2 + width, min(2 * around, largest + 1), width):
        if climb.must_end:
            break
        if size % step == 0:
            climb.throughput(size)
    return climb.answer()


class _Climb:
    """Sizes tried so far."""

    def __init__(self, problem: Problem, search: Search, control: Control, top: int | None) -> None:
        self.problem, self.search, self.control, self.top = problem, search, control, top
        self.found: dict[int, list[Candidate]] = {}
        self.refusal: NoFeasiblePlan | None = None

    @property
    def must_end(self) -> bool:
        return bool(self.best) and self.control.expired()

    @property
    def best(self) -> int | None:
        """The size with the best throughput; of equal ones the smallest."""
        fitting = [size for size, candidates in self.found.items() if candidates]
        return min(fitting, key=lambda size: (-self._rate(size), size), default=None)

    def _rate(self, size: int) -> float:
        candidates = self.found[size]
        return size / candidates[0].estimate.iteration_seconds if candidates else 0.0

    def throughput(self, size: int) -> float:
        """Samples per second; 0 where nothing fits."""
        if size not in self.found:
            try:
                tried = self.search(replace(self.problem, global_batch_size=size), self.control, self.top)
            except NoFeasiblePlan as refusal:
                self.refusal = self.refusal or refusal
                tried = []
            self.found[size] = tried
        return self._rate(size)

    def answer(self) -> BatchSize:
        assert self.best is not None
        rates = tuple((size, self._rate(size)) for size in sorted(self.found))
        return BatchSize(self.best, tuple(self.found[self.best]), rates)
