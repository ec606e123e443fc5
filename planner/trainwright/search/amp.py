"""AMP's Algorithm 1: every degree and micro-batch size in Megatron's placement, refined by a local search over layer moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainwright.search.candidates import LazyCandidate, best_of, fastest_first, fitting_candidate
from trainwright.search.degrees import Degrees, micro_batch_sizes
from trainwright.search.node_order import device_orders
from trainwright.search.problem import Candidate, Problem, SearchControl
from trainwright.search.uniform.placed_stages import PlacedStages, megatron_placement
from trainwright.search.uniform.plan_space import UniformPlanSpace, check_profiled, infeasibility_error, open_degrees

Ends = tuple[int, ...]
MAX_MOVED_LAYERS = 8
"""Maximum number of layers that a move transfers; moves transfer powers of two."""


@dataclass
class PartitionDescent:
    """Local search over layer partitions, from one candidate in Megatron's placement.

    A move transfers layers from one stage to another; the stages between shift. Feasible moves are evaluated in the order of
    their lower bounds, and the first faster one becomes the incumbent.

    Attributes:
        remaining_replays: exact evaluations left.
        patience: maximum number of evaluations in a row without an improvement.
    """

    plan_space: UniformPlanSpace
    remaining_replays: int
    patience: int

    def improve(self, candidate: Candidate) -> Candidate:
        """Return the candidate or a faster one with the same degrees, rows and device order."""
        pipeline = candidate.plan.pipelines[0]
        run = pipeline.stages[0].layers[0]
        tensor, data = run.strategy.degrees
        degrees = Degrees(len(pipeline.stages), data, tensor)
        stages = self.plan_space.tables.place_stages(megatron_placement(degrees))
        seen = {_ends(candidate)}
        while True:
            faster = self._first_faster_neighbour(candidate, stages, run.rows[0], seen)
            if faster is None:
                return candidate
            candidate = faster

    def _first_faster_neighbour(
        self, incumbent: Candidate, stages: PlacedStages, rows: int, seen: set[Ends]
    ) -> Candidate | None:
        """Return the first faster neighbour; None if none is found."""
        seconds = incumbent.estimate.iteration_seconds
        unseen = [ends for ends in partition_neighbours(_ends(incumbent)) if ends not in seen]
        if not unseen:
            return None
        neighbours = np.array(unseen, dtype=np.intp)
        neighbours = neighbours[self.plan_space.fitting_mask(stages, rows, neighbours)]
        bounds = self.plan_space.bounds.seconds_of_all(stages, rows, neighbours)
        for number in np.argsort(bounds, kind="stable")[: self.patience].tolist():
            if bounds[number] >= seconds or self.remaining_replays == 0:
                break
            self.remaining_replays -= 1
            ends = tuple(neighbours[number].tolist())
            seen.add(ends)
            candidate = fitting_candidate(self.plan_space.problem, self.plan_space.plan(stages.placement, rows, ends))
            if candidate is not None and candidate.estimate.iteration_seconds < seconds:
                return candidate
        return None


def _ends(candidate: Candidate) -> Ends:
    return tuple(stage.end for stage in candidate.plan.pipelines[0].stages)


def partition_neighbours(ends: Ends) -> list[Ends]:
    """Return all partitions that one move makes of this one; no stage becomes empty."""
    sizes = np.diff(ends, prepend=0)
    stages = len(ends)
    neighbours: list[Ends] = []
    count = 1
    while count <= MAX_MOVED_LAYERS:
        for source in range(stages):
            if sizes[source] <= count:
                continue
            for target in range(stages):
                if target != source:
                    step = -count if source < target else count
                    between = range(min(source, target), max(source, target))
                    neighbours.append(tuple(end + step if i in between else end for i, end in enumerate(ends)))
        count *= 2
    return neighbours


MAX_ASSIGNMENTS = 640
"""Maximum number of choices times device orders: more choices leave fewer orders."""
MAX_EXHAUSTIVE_PLANS = 10_000
"""Maximum number of plans (partitions of all choices in all device orders) for exhaustive evaluation."""
POLISHED_CHOICES = 6
"""Number of the best choices that are refined."""
MAX_REPLAYS_PER_CHOICE = 24
"""Maximum number of replays to refine one choice."""
MAX_REPLAYED_DEVICES = 2**13
"""Maximum number of devices over all replays of one choice, which limits replays on large clusters."""
PATIENCE = 6
"""Replays without an improvement after which a choice is final."""


def amp(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return AMP's candidates (Algorithm 1): the best plan of each choice of degrees and micro-batch size, best first.

    In each device order (`device_orders`; AMP uses that of its host file), a choice gets the layer assignment that minimises
    Eq. 5 under the memory limit (which AMP ignores). The exact replay then ranks the plans; plans whose lower bound exceeds
    the `top` best are not replayed.

    Two additions to the paper, since Eq. 5 ranks assignments differently from the replay: the best choices are refined
    (`PartitionDescent`), and if there are at most MAX_EXHAUSTIVE_PLANS plans, all assignments in all orders replace the
    optimum of Eq. 5. The result is then optimal, so that a faster link or device or more memory never makes it slower;
    otherwise it may, rarely. Raises NoFeasiblePlan, with the plan closest to fitting, if no assignment fits.
    """
    check_profiled(problem)
    search = _Algorithm1(problem, control)
    lazy_candidates = search.lazy_candidates()
    if search.is_exhaustive:
        return best_of(problem, lazy_candidates, control, top, steps_before=search.completed_steps)
    evaluated = None if top is None else max(top, POLISHED_CHOICES)
    ranked = best_of(
        problem, lazy_candidates, control, evaluated, steps_before=search.completed_steps, steps_after=POLISHED_CHOICES
    )
    return search.polish(ranked, search.completed_steps + len(lazy_candidates))


def count_plans(problem: Problem) -> int:
    """Count the layer assignments of all choices in all node orders, equal nodes counted as different.

    The count depends on the numbers of nodes, devices, layers and rows only, not on speeds or sizes.
    """
    layers = len(problem.model.layers)
    choices = (
        math.comb(layers - 1, degrees.pipeline - 1) * len(micro_batch_sizes(problem.global_batch_size, degrees.data))
        for degrees in open_degrees(problem)
    )
    return sum(choices) * math.factorial(len(problem.nodes))


class _Algorithm1:
    """State of one run of the search."""

    def __init__(self, problem: Problem, control: SearchControl) -> None:
        self.problem, self.control = problem, control
        first = UniformPlanSpace.of(problem)
        self.choices, self.completed_steps = sum(1 for _ in first.choices()), 0
        # Without valid degrees there are no plans, and all node orders would be built in vain.
        self.is_exhaustive = 0 < count_plans(problem) <= MAX_EXHAUSTIVE_PLANS
        max_orders = (
            math.factorial(len(problem.nodes)) if self.is_exhaustive else MAX_ASSIGNMENTS // max(self.choices, 1)
        )
        orders = device_orders(problem, max_orders)
        self.plan_spaces = [first, *(first.with_order(order) for order in orders[1:])]

    def lazy_candidates(self) -> list[LazyCandidate]:
        """Return the candidates of all choices in all orders; raise NoFeasiblePlan if there are none."""
        candidates: list[LazyCandidate] = []
        first_seconds: float | None = None
        total = len(self.plan_spaces) * self.choices
        for plan_space in self.plan_spaces:
            for stages, rows in plan_space.choices():
                had_any = bool(candidates)
                candidates += self._candidates_of_choice(plan_space, stages, rows)
                if candidates and not had_any:
                    first_seconds = self._exact_seconds(candidates[0])
                self.completed_steps += 1
                self.control.report_progress(self.completed_steps, 2 * total + POLISHED_CHOICES, first_seconds)
                if candidates and self.control.expired():
                    return candidates
        if not candidates:
            raise infeasibility_error(self.problem, self.plan_spaces[0].plans_ignoring_memory())
        return candidates

    def _candidates_of_choice(
        self, plan_space: UniformPlanSpace, stages: PlacedStages, rows: int
    ) -> Iterator[LazyCandidate]:
        choice = stages.placement.shape, rows
        if self.is_exhaustive:
            return plan_space.lazy_candidates(stages, rows, plan_space.feasible_assignments(stages, rows), choice)
        ends = plan_space.best_assignment(stages, rows)
        return iter(()) if ends is None else plan_space.lazy_candidates(stages, rows, np.array([ends]), choice)

    def _exact_seconds(self, draft: LazyCandidate) -> float | None:
        """Return the exact seconds for progress reports; None if the plan does not fit after all."""
        candidate = fitting_candidate(self.problem, draft.build_plan())
        return None if candidate is None else candidate.estimate.iteration_seconds

    def polish(self, candidates: list[Candidate], steps_before: int) -> list[Candidate]:
        """Refine the first candidates and return all, best first; `steps_before` counts earlier progress steps."""
        plan_space_of = {drafting.order.devices: drafting for drafting in self.plan_spaces}
        replays = min(MAX_REPLAYS_PER_CHOICE, MAX_REPLAYED_DEVICES // len(self.problem.devices))
        polished_candidates, rest = candidates[:POLISHED_CHOICES], candidates[POLISHED_CHOICES:]
        for index, leader in enumerate(polished_candidates):
            if self.control.expired():
                break
            polished_candidates[index] = PartitionDescent(
                plan_space_of[leader.plan.devices], replays, PATIENCE
            ).improve(leader)
            best = min(candidate.estimate.iteration_seconds for candidate in polished_candidates)
            self.control.report_progress(steps_before + index + 1, steps_before + POLISHED_CHOICES, best)
        return fastest_first([*polished_candidates, *rest])
