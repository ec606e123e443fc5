"""Galvatron-Base (Algorithm 1) and Galvatron-BMW (Algorithm 2), with solutions evaluated by the exact replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile
from operator import attrgetter

from trainwright.plan import Plan
from trainwright.search.candidates import DeviceSymmetry, fastest_first, fitting_candidate
from trainwright.search.galvatron.balanced_partition import layer_moves, neighbours
from trainwright.search.galvatron.partition_search import (
    SplitTables,
    adjust_partitions,
    descend_partitions,
    even_partition,
    fitting_partition,
    memory_balanced_partition,
)
from trainwright.search.galvatron.pipeline_solutions import (
    GroupTablesCache,
    PipelineSolution,
    PipelineSplit,
    StageEnds,
    StageSolution,
)
from trainwright.search.problem import Candidate, NoFeasiblePlan, Problem, SearchControl
from trainwright.search.uniform.plan_space import check_profiled, infeasibility_error

SolutionGenerator = Callable[[SplitTables, float], Iterable[PipelineSolution]]
"""Function that yields a search's solutions for one pipeline split.

It may skip solutions whose Eq. 8, by the tables, exceeds the given seconds.
"""

SLACK_RATIO = 1.15
"""Multiple of the best Eq. 8 above which pipeline splits are skipped by their bound, once there are enough plans."""
ENOUGH_PLANS = 8
"""Number of plans from which splits may be skipped, regardless of how many are requested."""
MAX_SPLITS_BEYOND_LIMIT = 12
"""Maximum number of splits beyond the limit that are explored while the replay finds no plan as fast as their bounds.

The replay includes costs that Eq. 8 omits.
"""
COSTED_PER_CUT = 6
"""Number of solutions per split that are evaluated exactly, the best by Eq. 8."""


@dataclass(frozen=True, slots=True)
class CostedSolution:
    """Solution of a pipeline split with its exact evaluation."""

    split: PipelineSplit
    solution: PipelineSolution
    candidate: Candidate

    @property
    def exact_seconds(self) -> float:
        return self.candidate.estimate.iteration_seconds


@dataclass
class SolutionPool:
    """Pool of the solutions of all splits with their exact costs, distinct up to device symmetry.

    Attributes:
        steps: total steps of the search, for progress reports.
        solutions: those that fit, by the canonical key of their plan.
        best_eq8_seconds: least Eq. 8 of all solutions.
    """

    problem: Problem
    control: SearchControl
    tables: Sequence[SplitTables]
    steps: int
    done: int = 0
    solutions: dict[Hashable, CostedSolution] = field(default_factory=dict)
    best_eq8_seconds: float = math.inf

    def __post_init__(self) -> None:
        self._symmetry = DeviceSymmetry(self.problem.cluster)
        bounds = (0.0 if self.control.expired() else table.quick_bound() for table in self.tables)
        self._quick = sorted((bound, number) for number, bound in enumerate(bounds))

    def run(self, explore: SolutionGenerator) -> None:
        """Explore splits in the order of their bounds, until the rest cannot be close to the best.

        Once the budget is spent, splits are not bounded any more, and the first plan that fits ends the search.
        """
        ends = self.done + len(self.tables)
        further = 0
        for table in self._by_bound():
            is_late = self.control.expired()
            if (self.solutions and is_late) or (not is_late and table.lower_bound > self.control.max_seconds):
                break
            if not is_late and table.lower_bound > self._limit:
                further += 1
                if further > MAX_SPLITS_BEYOND_LIMIT or table.lower_bound > (self._best_seconds or math.inf):
                    break
            self._add(table.split, (balanced_solutions if is_late else explore)(table, self._limit))
            self.report_progress(self.done + 1)
        self.report_progress(ends)

    def _by_bound(self) -> Iterator[SplitTables]:
        """Yield splits by ascending bound, which is computed only when the cheaper quick bound comes next."""
        waiting: list[tuple[float, int]] = []
        for quick, number in self._quick:
            if quick > self.control.max_seconds:
                break
            while waiting and waiting[0][0] < quick:
                yield self.tables[heappop(waiting)[1]]
            heappush(waiting, (quick if self.control.expired() else self.tables[number].lower_bound, number))
        while waiting:
            yield self.tables[heappop(waiting)[1]]

    @property
    def _limit(self) -> float:
        """Return the Eq. 8 above which a split is skipped."""
        is_known = len(self.solutions) >= ENOUGH_PLANS
        return min(SLACK_RATIO * self.best_eq8_seconds if is_known else math.inf, self.control.max_seconds)

    def report_progress(self, done: int) -> None:
        """Report `done` steps and the best seconds so far."""
        self.done = done
        self.control.report_progress(done, self.steps, self._best_seconds)

    @property
    def _best_seconds(self) -> float | None:
        return min((item.exact_seconds for item in self.solutions.values()), default=None)

    def _add(self, cut: PipelineSplit, solutions: Iterable[PipelineSolution]) -> None:
        useful = (solution for solution in solutions if solution.seconds <= self.control.max_seconds)
        for solution in sorted(useful, key=attrgetter("seconds"))[:COSTED_PER_CUT]:
            self.best_eq8_seconds = min(self.best_eq8_seconds, solution.seconds)
            for variant in cut.variants(solution):
                self.evaluate(cut, variant)

    def evaluate(self, cut: PipelineSplit, solution: PipelineSolution) -> CostedSolution | None:
        """Return the solution with its exact cost, None if it exceeds memory by the exact model."""
        plan = cut.plan(solution)
        key = self._symmetry.canonical_key(plan)
        if key not in self.solutions:
            candidate = fitting_candidate(self.problem, plan)
            if candidate is None:
                return None
            self.solutions[key] = CostedSolution(cut, solution, candidate)
        return self.solutions[key]

    def best_of_splits(self) -> list[CostedSolution]:
        """Return the best solution of every split, fastest first."""
        best: dict[int, CostedSolution] = {}
        for item in sorted(self.solutions.values(), key=attrgetter("exact_seconds")):
            best.setdefault(id(item.split), item)
        return list(best.values())

    def ranked(self) -> list[Candidate]:
        """Return all candidates, fastest first."""
        return fastest_first(item.candidate for item in self.solutions.values())


STARTS = 12
"""Maximum number of splits whose best solution starts a descent."""
COSTED_IN_DESCENT = 128
"""Approximate number of plans evaluated in descents, fewer above `REFERENCE_DEVICES`, where each takes longer."""
REFERENCE_DEVICES = 64

_ROUNDING = 1e-12


def improve_partitions(pool: SolutionPool) -> None:
    """Descend from the best of every split by the layer move that helps most in the exact replay, and keep all plans tried.

    Eq. 8 ignores which stage's messages, gradient reduction or optimizer step the pipeline waits for.
    """
    most = len(pool.solutions) + COSTED_IN_DESCENT * REFERENCE_DEVICES // max(
        REFERENCE_DEVICES, len(pool.problem.devices)
    )
    for start in pool.best_of_splits()[:STARTS]:
        if start.exact_seconds > pool.control.max_seconds:
            break
        best = start
        for neighbourhood in (neighbours, layer_moves):
            improves = True
            while improves and len(pool.solutions) < most and not pool.control.expired():
                within = takewhile(lambda _: not pool.control.expired(), neighbourhood(best.solution.ends))
                solutions = [_evaluate(pool, best, ends) for ends in within]
                fastest = min((item for item in solutions if item), key=attrgetter("exact_seconds"), default=best)
                improves = fastest.exact_seconds < best.exact_seconds * (1 - _ROUNDING)
                best = fastest if improves else best


def _evaluate(exploration: SolutionPool, best: CostedSolution, ends: StageEnds) -> CostedSolution | None:
    solution = best.split.solution(ends)
    return exploration.evaluate(best.split, solution) if solution is not None else None


def search_pipelines(
    problem: Problem, control: SearchControl, explorers: Sequence[SolutionGenerator], *, descends: bool = False
) -> list[Candidate]:
    """Return the candidates of all explorers, fastest first by the exact replay, optionally improved by descents.

    Which plans are evaluated does not depend on how many are requested.

    Raises:
        NoFeasiblePlan: Nothing fits; the error names the plans that come closest. Or all are slower than asked for.
    """
    check_profiled(problem)
    tables = [SplitTables(cut) for cut in GroupTablesCache(problem).pipeline_splits()]
    pool = SolutionPool(problem, control, tables, steps=len(explorers) * len(tables) + 1)
    for explore in explorers:
        pool.run(explore)
    if not pool.solutions and control.max_seconds < math.inf:
        raise NoFeasiblePlan(f"no plan takes less than {control.max_seconds:.4g} s")
    if not pool.solutions:
        raise infeasibility_error(problem, _min_memory_plans(problem))
    if descends:
        improve_partitions(pool)
    pool.report_progress(pool.steps)
    return pool.ranked()


def _min_memory_plans(problem: Problem) -> Iterator[Plan]:
    """Yield for every split the plan whose layers use the least memory, to explain why nothing fits."""
    bench = GroupTablesCache(problem)
    layers = bench.sequence.layers
    for cut in bench.pipeline_splits():
        ends = even_partition(cut)
        if ends is None:
            continue
        chosen = []
        for stage, first, end in zip(cut.stages, (0, *ends), ends, strict=False):
            resident_bytes = stage.forward_bytes + stage.peak_bytes
            members = bench.sequence.range_classes(0, layers)[first:end]
            chosen.append(
                StageSolution(tuple(int(resident_bytes[member].argmin()) for member in members), 0.0, 0.0, 0.0)
            )
        yield cut.plan(PipelineSolution(ends, tuple(chosen), 0.0))


def galvatron_base(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return candidates of Algorithm 1 for a given batch, fastest first by the exact replay.

    The paper takes one partition (balanced by layers, time or memory) and one number of micro-batches as given; here
    all three partitions and all divisors of the batch are tried.

    Raises:
        NoFeasiblePlan: Nothing fits.
    """
    del top
    return search_pipelines(problem, control, (balanced_solutions,))


def balanced_solutions(tables: SplitTables, limit_seconds: float) -> Iterator[PipelineSolution]:
    """Yield solutions of the partitions that balance layers, time and memory."""
    del limit_seconds
    cut = tables.split
    partitions = (even_partition(cut), tables.time_balanced(), memory_balanced_partition(cut))
    for ends in dict.fromkeys(partitions):
        solution = cut.solution(ends) if ends is not None else None
        if solution is not None:
            yield solution


DESCENTS = 8
"""Maximum number of boundary moves from the best partition found."""


def galvatron_bmw(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return candidates of Algorithm 2 for a given batch, fastest first by the exact replay.

    To the paper's queue of adjusted partitions it adds the best partitions by Eq. 8 over tables of all stages, their
    neighbours, and pipeline degree 1, which Algorithm 2 leaves to Galvatron-Base.

    Raises:
        NoFeasiblePlan: Nothing fits.
    """
    del top
    return search_pipelines(problem, control, (balanced_solutions, adjusted_solutions), descends=True)


def adjusted_solutions(tables: SplitTables, limit_seconds: float) -> Iterator[PipelineSolution]:
    """Yield the solutions of Galvatron-Base, those of the paper's queue, and better ones found from tables."""
    cut = tables.split
    solutions = list(balanced_solutions(tables, limit_seconds))
    if len(cut.devices) > 1 and tables.lower_bound <= limit_seconds:
        solutions += _improved_solutions(tables, limit_seconds, solutions)
    yield from {solution.ends: solution for solution in solutions}.values()


def _improved_solutions(
    tables: SplitTables, limit_seconds: float, solutions: list[PipelineSolution]
) -> list[PipelineSolution]:
    cut = tables.split
    free, fitting = tables.best(), fitting_partition(cut)
    if fitting is not None and fitting.seconds > limit_seconds:
        return []
    tried = (cut.solution(partition.ends) for partition in (free, fitting) if partition is not None)
    improved = [solution for solution in tried if solution is not None]
    start = memory_balanced_partition(cut)
    if start is not None:
        improved += adjust_partitions(cut, start, tables.time_balanced())
    if solutions or improved:
        improved.append(descend_partitions(cut, min([*solutions, *improved], key=attrgetter("seconds")), DESCENTS))
    return improved
