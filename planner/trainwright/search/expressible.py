"""Search among the plans that a trainer supports, from plans that it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from trainwright.exports import Capabilities, UniformShape, is_expressible, nearest_shapes, shape_of
from trainwright.exports.shape_moves import neighbours
from trainwright.plan import Plan
from trainwright.search.candidates import candidate_of, fastest_first, fitting_candidate
from trainwright.search.megatron import megatron
from trainwright.search.plan_variants import fastest_variant, without_runtime_choices
from trainwright.search.problem import Candidate, NoFeasiblePlan, NoPlanFits, Problem, Search, SearchControl

STARTS, DESCENTS = 40, 4
"""Shapes that are costed near a plan, and those of all of them from which the search descends, besides each plan's fastest."""
MAX_STARTING_PLANS, MIN_CANDIDATES = 8, 32
"""Plans of the other search from which a limited search descends, of each of two kinds, and those it is asked for."""
PARTS: Final = 4 / 3
"""Parts of the time of which the other search gets one; the descents took a quarter of both on 16 devices."""
MAX_EVALUATIONS: Final = 600
"""Maximum number of plans that are costed from one plan, on average."""
MIN_GAIN_RATIO: Final = 1e-6


def expressible_candidates(
    problem: Problem, plans: Iterable[Plan], capabilities: Capabilities, control: SearchControl
) -> list[Candidate]:
    """Return plans that the trainer supports, fastest first; empty if none of those that were tried fits.

    Plans that it supports are among them; the search descends from the shapes nearest to the others.
    """
    if not (capabilities.sequence_parallel or capabilities.every_plan):
        problem = replace(problem, runtime=replace(problem.runtime, sequence_parallel=False))
    return _Descent(problem, capabilities, control).run([*plans])


@dataclass(frozen=True)
class ExpressibleSearch:
    """Search among the plans that a trainer supports.

    It runs another search without that limit, and descends from the shapes nearest to its plans, and from Megatron's heuristic.
    """

    search: Search
    capabilities: Capabilities

    def __call__(self, problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        """Return the trainer's plans, fastest first. Raises NoFeasiblePlan if none of those that were tried fits."""
        free = replace(problem, limits=replace(problem.limits, expressible_by=None))
        unlimited = self.search(free, control.part(PARTS), None if top is None else max(top, MIN_CANDIDATES))
        capabilities = self.capabilities.of(problem.model, problem.optimizer)
        plans = _starting_plans(unlimited, capabilities)
        with suppress(NoFeasiblePlan):
            plans += [candidate.plan for candidate in megatron(free, control, 1)]
        candidates = expressible_candidates(free, plans, capabilities, control)
        if not candidates:
            raise NoPlanFits("no plan that the trainer supports fits into memory; allow other plans or trainers")
        fastest = (fastest_variant(unlimited[0], free), candidates[0])
        seconds = min(candidate.estimate.iteration_seconds for candidate in fastest)
        return [replace(candidate, unlimited_seconds=seconds) for candidate in candidates[:top]]


def _starting_plans(candidates: Sequence[Candidate], capabilities: Capabilities) -> list[Plan]:
    """Return the fastest plans that the trainer supports, and the fastest one of each number of stages."""
    plans = [candidate.plan for candidate in candidates]
    expressible = [plan for plan in plans if is_expressible(plan, capabilities)]
    of_each_depth: dict[tuple[int, ...], Plan] = {}
    for plan in plans:
        of_each_depth.setdefault(tuple(len(pipeline.stages) for pipeline in plan.pipelines), plan)
    return list(dict.fromkeys([*[*of_each_depth.values()][:MAX_STARTING_PLANS], *expressible[:MAX_STARTING_PLANS]]))


def nearest_candidate(problem: Problem, plan: Plan, capabilities: Capabilities) -> Candidate:
    """Return the plan if the trainer supports it, else the fastest one near it that fits.

    If none fits, the nearest one, whose estimate says what is missing.
    """
    capabilities = capabilities.of(problem.model, problem.optimizer)
    if is_expressible(plan, capabilities):
        return candidate_of(problem, plan)
    candidates = expressible_candidates(problem, [plan], capabilities, SearchControl())
    if candidates:
        return without_runtime_choices(candidates[0], problem)
    return candidate_of(problem, nearest_shapes(plan, capabilities)[0].plan())


@dataclass
class _Descent:
    problem: Problem
    capabilities: Capabilities
    control: SearchControl
    costed: dict[Plan, Candidate | None] = field(default_factory=dict)
    max_evaluations: int = MAX_EVALUATIONS

    def run(self, plans: list[Plan]) -> list[Candidate]:
        self.max_evaluations = MAX_EVALUATIONS * len(plans)
        starts: list[UniformShape] = []
        fastest_of_plans: list[UniformShape] = []
        for plan in plans:
            if self._is_over():
                break
            given = shape_of(plan) if is_expressible(plan, self.capabilities) else None
            shapes = nearest_shapes(plan, self.capabilities)[:STARTS]
            tried = map(self._cost_with_savings, (*([given] if given else []), *shapes))
            best_shapes = sorted((shape for shape in tried if shape is not None), key=self._seconds)
            starts += best_shapes
            fastest_of_plans += best_shapes[:1]
        first = [*sorted(starts, key=self._seconds)[:DESCENTS], *sorted(fastest_of_plans, key=self._seconds)]
        for shape in dict.fromkeys(first):
            self._descend(shape)
        return fastest_first(candidate for candidate in self.costed.values() if candidate is not None)

    def _seconds(self, shape: UniformShape) -> float:
        candidate = self.costed[shape.plan()]
        assert candidate is not None
        return candidate.estimate.iteration_seconds

    def _cost_with_savings(self, shape: UniformShape) -> UniformShape | None:
        """Cost a shape; if it does not fit, the first neighbour that does."""
        if self._cost(shape) is not None:
            return shape
        return next(
            (neighbour for neighbour in neighbours(shape, self.capabilities) if self._cost(neighbour) is not None), None
        )

    def _descend(self, shape: UniformShape) -> None:
        """Move to the fastest neighbour until none is faster."""
        while not self._is_over():
            faster = [
                neighbour for neighbour in neighbours(shape, self.capabilities) if self._cost(neighbour) is not None
            ]
            best = min(faster, key=self._seconds, default=None)
            if best is None or self._seconds(best) >= self._seconds(shape) * (1 - MIN_GAIN_RATIO):
                return
            shape = best

    def _is_over(self) -> bool:
        found_some = any(candidate is not None for candidate in self.costed.values())
        return found_some and (len(self.costed) >= self.max_evaluations or self.control.expired())

    def _cost(self, shape: UniformShape) -> Candidate | None:
        plan = shape.plan()
        if plan not in self.costed:
            if self._is_over():
                return None
            try:
                self.costed[plan] = fitting_candidate(self.problem, plan)
            except ValueError:  # a layer without a profile at this degree or these rows
                self.costed[plan] = None
        return self.costed[plan]
