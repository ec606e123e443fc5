"""Local search from a plan by exactly costed moves, with recompute where memory is short."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from trainwright.cost.context import CostContext
from trainwright.cost.memory import stage_memory
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.cost.plan_layout import PlanLayout, StageKey
from trainwright.plan import Plan, Stage
from trainwright.rank_layout import node_layouts
from trainwright.search.auto.diversity import best_of_each_shape
from trainwright.search.auto.layer_rebalancing import (
    LayerRebalancer,
    StageConfig,
    stage_configs,
    with_stage_configs,
)
from trainwright.search.auto.neighbourhood import (
    NEEDS_REBALANCING,
    NEIGHBOURHOODS,
    EditablePipeline,
    Neighbourhood,
    editable_pipelines,
)
from trainwright.search.candidates import DeviceSymmetry, fitting_candidate
from trainwright.search.plan_defaults import stage_with_runtime_choices, with_runtime_choices
from trainwright.search.problem import Candidate, Problem, SearchControl


def repair_memory(plan: Plan, context: CostContext) -> Plan | None:
    """Recompute the fewest first layers of each stage that exceeds memory; return None if that is not enough.

    Bisection assumes that every layer saves bytes; a layer that saves none may add unneeded recompute.
    """
    plan_layout = PlanLayout(with_runtime_choices(plan, context), context)
    for index, pipeline in enumerate(plan.pipelines):
        count, configs = len(pipeline.stages), list(stage_configs(pipeline))
        chunks = context.runtime.chunks_of(pipeline.micro_batches, pipeline.layer_counts)
        for number, stage in enumerate(pipeline.stages):
            in_flight = in_flight_micro_batches(plan.schedule, pipeline.micro_batches, number, count, chunks)
            limit = _StageMemoryLimit(plan_layout, (index, number), in_flight)
            if not limit.fits(stage):
                repaired = limit.repair(configs[number])
                if repaired is None:
                    return None
                configs[number] = repaired
        plan = with_stage_configs(plan, index, configs)
    return plan


@dataclass(frozen=True)
class _StageMemoryLimit:
    """Memory limit of one stage's devices, in which only recompute may change."""

    plan_layout: PlanLayout
    key: StageKey
    in_flight_micro_batches: float

    def fits(self, stage: Stage) -> bool:
        context, (pipeline, number) = self.plan_layout.context, self.key
        stage = stage_with_runtime_choices(stage, context)
        memory_parts = stage_memory(
            stage,
            node_layouts(stage),
            context,
            in_flight_count=self.in_flight_micro_batches,
            micro_batches=self.plan_layout.plan.pipelines[pipeline].micro_batches,
            divided_sides=self.plan_layout.divided_sides(pipeline, number),
            mixed_sharding_layers=self.plan_layout.mixed_sharding_layers,
        )
        memory = context.memory_of_node
        return all(
            part.total_bytes <= memory[device.node] for device, part in zip(stage.devices, memory_parts, strict=True)
        )

    def repair(self, config: StageConfig) -> StageConfig | None:
        stored_layers = [number for number, layer in enumerate(config.layers) if not layer.strategy.recompute]

        def changed(count: int) -> StageConfig:
            return config.map_some_layers(stored_layers[:count], lambda layer: layer.with_strategy(recompute=True))

        first_layer = self.plan_layout.plan.pipelines[self.key[0]].stages[self.key[1]].first
        fewest_recomputed = bisect_left(
            range(len(stored_layers) + 1), True, key=lambda count: self.fits(changed(count).to_stage(first_layer))
        )
        return changed(fewest_recomputed) if fewest_recomputed <= len(stored_layers) else None


_FITTING_COST, _OVERSIZED_COST = 1.0, 0.375
"""Evaluations charged for a plan that fits, and for one that does not."""
MIN_GAIN_RATIO = 1e-6
"""Minimum relative gain of an accepted move."""
_MIN_EVALUATIONS, _MAX_EVALUATIONS = 100, 150
"""Minimum and maximum evaluations of local search from a perturbed plan."""
_MAX_SLOWDOWN = 0.02
"""Initial maximum relative slowdown at which a plan becomes the incumbent."""
_OTHER_SHAPE_PERIOD = 4
"""Mean number of perturbations between those that start from another shape."""
_MAX_PERTURBATIONS = 6
"""Maximum attempts at a perturbed plan that fits."""
_MAX_FAILED_STEPS = 200
"""Consecutive failed perturbations after which the search ends."""


@dataclass
class CandidateEvaluator:
    """Exact evaluator that costs each plan once.

    Attributes:
        remaining_evaluations: evaluations left; a plan that does not fit counts as a fraction.
    """

    problem: Problem
    control: SearchControl
    remaining_evaluations: float
    evaluated: dict[Hashable, Candidate | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._symmetry = DeviceSymmetry(self.problem.cluster)
        self._rebalancer = LayerRebalancer(self.problem)
        self._rebalanced_keys: set[Hashable] = set()

    def evaluate(self, plan: Plan) -> Candidate | None:
        """Return the candidate; None if infeasible, over the limits or already evaluated."""
        plan = with_runtime_choices(plan, self.problem.cost_context)
        return self._evaluate(self._symmetry.canonical_key(plan), plan)

    def _evaluate(self, key: Hashable, plan: Plan) -> Candidate | None:
        if key in self.evaluated or self.remaining_evaluations <= 0 or not self.problem.limits.allows_plan(plan):
            return None
        try:
            candidate = self.evaluated[key] = fitting_candidate(self.problem, plan)
        except ValueError:  # a layer without a profile at this degree on these devices
            candidate = self.evaluated[key] = None
        self.remaining_evaluations -= _FITTING_COST if candidate is not None else _OVERSIZED_COST
        return candidate

    def evaluate_repaired(self, plan: Plan) -> Candidate | None:
        """Evaluate the plan or, if memory is short, its repair with more recompute."""
        plan = with_runtime_choices(plan, self.problem.cost_context)
        key = self._symmetry.canonical_key(plan)
        if key in self.evaluated:
            return None
        candidate = self._evaluate(key, plan)
        if candidate is None and key in self.evaluated:
            try:
                repaired = repair_memory(plan, self.problem.cost_context)
            except ValueError:  # a layer without a profile
                return None
            candidate = None if repaired is None else self.evaluate(repaired)
        return candidate

    def rebalanced(self, plan: Plan) -> Plan | None:
        """Return the plan with rebalanced layers; None if it was rebalanced before."""
        key = self._symmetry.canonical_key(with_runtime_choices(plan, self.problem.cost_context))
        if key in self._rebalanced_keys:
            return None
        self._rebalanced_keys.add(key)
        return self._rebalancer.rebalance(plan)

    def add(self, candidate: Candidate) -> None:
        """Add a candidate evaluated elsewhere."""
        self.evaluated.setdefault(self._symmetry.canonical_key(candidate.plan), candidate)

    @property
    def is_exhausted(self) -> bool:
        return self.remaining_evaluations <= 0 or self.control.expired()

    def feasible(self) -> list[Candidate]:
        return [candidate for candidate in self.evaluated.values() if candidate is not None]


def local_search(start: Candidate, evaluator: CandidateEvaluator, max_evaluations: float) -> Candidate:
    """Return the local optimum reached with at most `max_evaluations` evaluations.

    Neighbourhoods take turns; one that helped is tried again at once. Moves that unbalance stages are tried with rebalanced
    layers, then as they are.
    """
    incumbent, stop_at = start, max(evaluator.remaining_evaluations - max_evaluations, 0)
    editable = editable_pipelines(incumbent.plan, evaluator.problem)
    failed_kinds = 0
    kind_index = 0
    while (
        failed_kinds < len(NEIGHBOURHOODS) and evaluator.remaining_evaluations > stop_at and not evaluator.is_exhausted
    ):
        target_seconds = incumbent.estimate.iteration_seconds * (1 - MIN_GAIN_RATIO)
        better = _first_better(NEIGHBOURHOODS[kind_index], editable, target_seconds, evaluator, stop_at)
        if better is None:
            kind_index, failed_kinds = (kind_index + 1) % len(NEIGHBOURHOODS), failed_kinds + 1
        else:
            incumbent, failed_kinds = better, 0
            editable = editable_pipelines(incumbent.plan, evaluator.problem)
    return incumbent


def _first_better(
    neighbourhood: Neighbourhood,
    editable: Sequence[EditablePipeline],
    target_seconds: float,
    evaluator: CandidateEvaluator,
    stop_at: float,
) -> Candidate | None:
    """Return the first neighbour below `target_seconds`, until `stop_at` evaluations remain."""
    for move in neighbourhood(editable):
        try:
            moved = move()
        except ValueError:  # a replica would be left without rows
            continue
        for rebalances in (True, False) if neighbourhood in NEEDS_REBALANCING else (False,):
            if evaluator.remaining_evaluations <= stop_at or evaluator.is_exhausted:
                return None
            plan = evaluator.rebalanced(moved) if rebalances else moved
            candidate = None if plan is None else evaluator.evaluate_repaired(plan)
            if candidate is not None and candidate.estimate.iteration_seconds < target_seconds:
                return candidate
    return None


@dataclass
class IteratedLocalSearch:
    """Iterated local search: perturb, search locally, accept if hardly slower."""

    evaluator: CandidateEvaluator
    seed: int

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - not for secrets

    def steps(self, start: Candidate) -> Iterator[None]:
        """Perturb once per step until the budget ends or nothing new is found.

        The accepted slowdown shrinks with the remaining budget.
        """
        evaluator, incumbent, initial_evaluations, failed_steps = (
            self.evaluator,
            start,
            self.evaluator.remaining_evaluations,
            0,
        )
        while not evaluator.is_exhausted and failed_steps < _MAX_FAILED_STEPS:
            from_other_shape = self._random.randrange(_OTHER_SHAPE_PERIOD) == 0
            perturbed = self._perturb(
                self._random.choice(best_of_each_shape(evaluator.feasible())) if from_other_shape else incumbent
            )
            failed_steps = failed_steps + 1 if perturbed is None else 0
            if perturbed is not None:
                candidate = local_search(
                    perturbed,
                    evaluator,
                    min(_MAX_EVALUATIONS, max(evaluator.remaining_evaluations / 3, _MIN_EVALUATIONS)),
                )
                max_slowdown = (
                    _MAX_SLOWDOWN * evaluator.remaining_evaluations / initial_evaluations * self._random.random()
                )
                if candidate.estimate.iteration_seconds < incumbent.estimate.iteration_seconds * (1 + max_slowdown):
                    incumbent = candidate
            yield

    def _perturb(self, incumbent: Candidate) -> Candidate | None:
        """Apply one or two random moves; return None if no attempt fits."""
        problem = self.evaluator.problem
        for _ in range(_MAX_PERTURBATIONS):
            if self.evaluator.is_exhausted:
                return None
            plan = incumbent.plan
            try:
                for _ in range(self._random.randint(1, 2)):
                    moves = list(self._random.choice(NEIGHBOURHOODS)(editable_pipelines(plan, problem)))
                    if moves:
                        plan = self._random.choice(moves)()
            except ValueError:  # a replica without rows, or a degree without a profile
                continue
            candidate = self.evaluator.evaluate_repaired(plan)
            if candidate is not None:
                return candidate
        return None
