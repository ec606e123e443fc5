"""Megatron's heuristic as AMP describes it (§4.1), the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from trainwright.plan import divisors
from trainwright.search.candidates import LazyCandidate, best_of
from trainwright.search.degrees import Degrees
from trainwright.search.problem import Candidate, Problem, SearchControl
from trainwright.search.uniform.layer_partition import even_split
from trainwright.search.uniform.placed_stages import PlacedStages, megatron_placement
from trainwright.search.uniform.plan_space import UniformPlanSpace, check_profiled, infeasibility_error, open_degrees

Split = tuple[PlacedStages, int, tuple[int, ...]]
"""Placement, rows, and ends of the stages."""


class EvenSplits:
    """Even splits of one problem; all micro-batch sizes share a placement."""

    def __init__(self, drafting: UniformPlanSpace) -> None:
        self.plan_space = drafting
        self._stages: dict[Degrees, PlacedStages] = {}

    def with_rows(self, rows: int) -> Iterator[Split]:
        """Yield all even splits for a micro-batch size, in ascending tensor × pipeline degree."""
        batch = self.plan_space.problem.global_batch_size
        for degrees, ends in self._degrees:
            if batch % (degrees.data * rows) == 0:
                yield self._place(degrees), rows, ends

    @cached_property
    def _degrees(self) -> list[tuple[Degrees, tuple[int, ...]]]:
        """Degrees for which the model has enough layers, with the ends of the stages."""
        problem = self.plan_space.problem
        per_node = min(Counter(device.node for device in problem.devices).values())
        ascending = sorted(open_degrees(problem, max_tensor=per_node), key=_model_parallel_degree)
        split = ((degrees, even_split(problem.model, degrees.pipeline)) for degrees in ascending)
        return [(degrees, ends) for degrees, ends in split if ends is not None]

    def _place(self, degrees: Degrees) -> PlacedStages:
        if degrees not in self._stages:
            self._stages[degrees] = self.plan_space.tables.place_stages(megatron_placement(degrees))
        return self._stages[degrees]


def megatron(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return, for every micro-batch size, the feasible plans with the minimum tensor × pipeline degree, best first.

    The tensor degree is at most the devices of the smallest node; layers are split evenly. Plans of a micro-batch size that
    share the minimum are all candidates. Raises NoFeasiblePlan if none fits into memory.
    """
    check_profiled(problem)
    plan_space = UniformPlanSpace.of(problem)
    candidates = [*megatron_candidates(plan_space, control)]
    if not candidates:
        splits = EvenSplits(plan_space)
        all_splits = (split for rows in divisors(problem.global_batch_size) for split in splits.with_rows(rows))
        plans = (plan_space.plan(stages.placement, rows, ends) for stages, rows, ends in all_splits)
        raise infeasibility_error(problem, plans)
    return best_of(problem, candidates, control, top)


def megatron_candidates(plan_space: UniformPlanSpace, control: SearchControl) -> Iterator[LazyCandidate]:
    """Yield the heuristic's candidates; none if no plan fits into memory."""
    splits, has_some = EvenSplits(plan_space), False
    for rows in divisors(plan_space.problem.global_batch_size):
        for split in _smallest_that_fit(splits, rows):
            yield plan_space.lazy_candidate(*split)
            has_some = True
        if has_some and control.expired():
            break


def _smallest_that_fit(splits: EvenSplits, rows: int) -> list[Split]:
    fitting: list[Split] = []
    smallest = 0
    for split in splits.with_rows(rows):
        product = split[0].tensor * split[0].pipeline
        if fitting and product > smallest:
            break
        if splits.plan_space.fits(*split):
            fitting.append(split)
            smallest = product
    return fitting


def _model_parallel_degree(degrees: Degrees) -> int:
    return degrees.tensor * degrees.pipeline
