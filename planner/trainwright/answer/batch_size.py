"""Batch size with the best throughput (Galvatron's Algorithm 1, line 2), for any search."""

from __future__ import annotations

from dataclasses import replace

from trainwright.answer.answer import BatchSizes
from trainwright.search import Candidate, NoFeasiblePlan, Problem, Search, SearchControl

STEP = 8
"""Step of batch sizes, as in the paper's tables."""
MAX_BATCH_SIZE = 4096
"""Maximum batch size: larger batches rarely train better, and throughput hardly grows any more."""
MIN_GAIN_RATIO = 1.005
"""Minimum throughput ratio of a doubled batch for which doubling goes on."""
_REFINEMENT_SHARES = 2
"""Shares of the budget for the refinement, where each doubled size has one."""
REFINED_SIZES = 8
"""Divisor of the best size that gives the step of the refinement around it."""


def best_batch_size(  # noqa: PLR0913 - a search's arguments and the range
    problem: Problem,
    search: Search,
    control: SearchControl,
    top: int | None = None,
    *,
    step: int = STEP,
    largest: int = MAX_BATCH_SIZE,
) -> tuple[list[Candidate], BatchSizes]:
    """Return the candidates of the multiple of `step` up to `largest` with the most samples per second, best first.

    The problem's batch size does not matter.

    The paper raises the batch by the step until memory is exhausted. Since small micro-batches let large batches fit,
    throughput levels off long before: sizes double while that pays, then sizes around the best are tried. Every size has an
    equal share of the budget that is left, of which the refinement gets two. Raises NoFeasiblePlan if no size fits.
    """
    climb = _Climb(problem, search, control, top)
    size, previous_throughput = step, 0.0
    while size <= largest:
        throughput = climb.throughput(size, shares=(largest // size).bit_length() + _REFINEMENT_SHARES)
        if climb.should_stop or (previous_throughput > 0 and throughput < previous_throughput * MIN_GAIN_RATIO):
            break
        size, previous_throughput = 2 * size, throughput
    if climb.best is None:
        raise climb.infeasible or NoFeasiblePlan(f"no batch size up to {largest} is a multiple of {step}")
    best_size = climb.best
    width = max(step, best_size // REFINED_SIZES // step * step)
    refined = range(best_size // 2 + width, min(2 * best_size, largest + 1), width)
    for number, size in enumerate(refined):
        if climb.should_stop:
            break
        if size % step == 0:
            climb.throughput(size, shares=len(refined) - number)
    return climb.result()


class _Climb:
    """Sizes tried so far, with their candidates."""

    def __init__(self, problem: Problem, search: Search, control: SearchControl, top: int | None) -> None:
        self.problem, self.search, self.control, self.top = problem, search, control, top
        self.candidates_by_size: dict[int, list[Candidate]] = {}
        self.infeasible: NoFeasiblePlan | None = None

    @property
    def should_stop(self) -> bool:
        return bool(self.best) and self.control.expired()

    @property
    def best(self) -> int | None:
        """Size with the best throughput; the smallest of equals."""
        fitting = [size for size, candidates in self.candidates_by_size.items() if candidates]
        return min(fitting, key=lambda size: (-self._throughput_of(size), size), default=None)

    def _throughput_of(self, size: int) -> float:
        candidates = self.candidates_by_size[size]
        return size / candidates[0].estimate.iteration_seconds if candidates else 0.0

    def throughput(self, size: int, *, shares: int) -> float:
        """Return samples per second, from a search in one of the shares of the budget that is left; 0 if no plan fits."""
        if size not in self.candidates_by_size:
            try:
                tried = self.search(replace(self.problem, global_batch_size=size), self.control.part(shares), self.top)
            except NoFeasiblePlan as refusal:
                self.infeasible = self.infeasible or refusal
                tried = []
            self.candidates_by_size[size] = tried
        return self._throughput_of(size)

    def result(self) -> tuple[list[Candidate], BatchSizes]:
        assert self.best is not None
        rates = tuple((size, self._throughput_of(size)) for size in sorted(self.candidates_by_size))
        may_grow = self.control.expired() and self.best == rates[-1][0]
        return self.candidates_by_size[self.best], BatchSizes(self.best, rates, may_grow)
