"""Branch and bound over all plans of a tiny problem."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import le, sub

from trainwright.cost.context import CostContext
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.cost.pipeline_replay import replay_pipelines
from trainwright.cost.stage_times import PlanTimes
from trainwright.plan import Plan, Schedule, Sharding
from trainwright.search.auto.exhaustive.pipeline_shapes import PipelineShape, ShapeSpace, StageDevices, compositions
from trainwright.search.auto.exhaustive.stage_strategies import (
    LayerChoices,
    StageContext,
    StageStrategies,
    possible_strategies,
)
from trainwright.search.candidates import fastest_first, fitting_candidate
from trainwright.search.plan_defaults import with_sequence_parallel
from trainwright.search.problem import Candidate, NoFeasiblePlan, Problem, SearchControl

MAX_DEVICES, MAX_LAYERS, MAX_ROWS = 4, 4, 8
"""Limits above which enumeration takes too long."""
_ROUNDING = 1e-9

Shape = tuple[PipelineShape, ...]


def is_enumerable(problem: Problem) -> bool:
    """Return whether enumeration is quick: mostly under a second, a few where memory or slow links prune little."""
    return (
        len(problem.devices) <= MAX_DEVICES
        and len(problem.model.layers) <= MAX_LAYERS
        and problem.global_batch_size <= MAX_ROWS
    )


def enumerate_plans(
    problem: Problem, control: SearchControl, top: int | None, *, max_evaluations: float = math.inf
) -> list[Candidate]:
    """Return the `top` fastest feasible plans (None: the fastest), best first, ties arbitrary.

    The space is all 1F1B plans with one tensor degree and row split per stage, and sharding and recompute per layer.
    Plans with more recompute than memory requires are listed only where it costs nothing. After `max_evaluations` the best so
    far are returned; a complete enumeration sets `control.enumerated`.

    Raises:
        NoFeasiblePlan: no plan fits.
    """
    return _BranchAndBound(problem, control, top or 1, max_evaluations).run()


@dataclass
class _BranchAndBound:
    problem: Problem
    control: SearchControl
    top: int
    max_evaluations: float = math.inf
    found: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes = ShapeSpace(self.problem)
        self.evaluated_count = 0
        self.is_cut_short = False

    @property
    def cutoff(self) -> float:
        """Return the seconds from which a plan cannot improve the result."""
        if len(self.found) < self.top:
            return math.inf
        return self.found[self.top - 1].estimate.iteration_seconds * (1 - _ROUNDING)

    def _must_stop(self) -> bool:
        """Return whether to stop with what is found, and record that plans are left out."""
        if self.found and (self.evaluated_count >= self.max_evaluations or self.control.expired()):
            self.is_cut_short = True
        return self.is_cut_short

    @cached_property
    def _context_without_overlap(self) -> CostContext:
        """Return a context in which gradient sync never lengthens the last backward."""
        return replace(self.problem.cost_context, runtime=replace(self.problem.runtime, overlaps_gradients=False))

    def run(self) -> list[Candidate]:
        batch_splits = sorted(self._batch_splits(), key=lambda one: one[0])
        for done, (bound, places, rows) in enumerate(batch_splits):
            if bound >= self.cutoff or self._must_stop():
                break
            for shape in self._shapes_of(places, rows):
                self._explore(shape)
            self.control.report_progress(
                done, len(batch_splits), self.found[0].estimate.iteration_seconds if self.found else None
            )
        if not self.found:
            raise NoFeasiblePlan("no plan fits: the model needs more memory, or more devices, than there is")
        if not self.is_cut_short:
            self.control.enumerated.set()
        return fastest_first(self.found)[: self.top]

    def _batch_splits(self) -> Iterator[tuple[float, tuple[StageDevices, ...], tuple[int, ...]]]:
        """Yield the bound, devices and rows per iteration of each set of pipelines."""
        constant = self.problem.runtime.constant_seconds
        for places in self.shapes.arrangements():
            for rows in compositions(self.problem.global_batch_size, len(places)):
                shapes_by_pipeline = [self.shapes.pipeline_shapes(*one) for one in zip(places, rows, strict=True)]
                if all(shapes_by_pipeline):
                    yield max(shapes[0].bound_seconds for shapes in shapes_by_pipeline) + constant, places, rows

    def _shapes_of(self, places: tuple[StageDevices, ...], rows: tuple[int, ...]) -> list[Shape]:
        """Return combined shapes with a bound below the cutoff, lowest first."""
        cutoff = self.cutoff - self.problem.runtime.constant_seconds
        shapes_by_pipeline = [
            [shape for shape in self.shapes.pipeline_shapes(*one) if shape.bound_seconds < cutoff]
            for one in zip(places, rows, strict=True)
        ]
        return sorted(product(*shapes_by_pipeline), key=lambda shape: max(one.bound_seconds for one in shape))

    def _explore(self, shape: Shape) -> None:
        """Evaluate the shape's strategies that may beat the cutoff."""
        constant = self.problem.runtime.constant_seconds
        if max(one.bound_seconds for one in shape) + constant >= self.cutoff:
            return
        if self._must_stop() or not self._can_reduce_in_time(shape):
            return
        pipelines = tuple(one.to_pipeline(tuple(stage.without_savings for stage in one.stages)) for one in shape)
        plan = Plan(len(self.problem.model.layers), self.problem.global_batch_size, pipelines)
        # Replayed as it is evaluated: without sequence parallelism it may take longer than the shape's plans.
        plan_without_savings = with_sequence_parallel(plan, self.problem.cost_context)
        chunks = [self.problem.runtime.chunks_of(one.micro_batches, one.layer_counts) for one in pipelines]
        # Longer passes may hide messages, and each of interleaved stages counts several times, so these are left out.
        ends = {
            key: max(map(sub, times.ends, times.transit_seconds)) if chunks[key[0]] > 1 else max(times.ends)
            for key, times in replay_pipelines(PlanTimes(plan_without_savings, self._context_without_overlap)).items()
        }
        if max(ends.values()) + constant >= self.cutoff:
            return
        pipeline_sync = self._pipeline_sync_seconds_per_byte(shape)
        strategies_by_stage: list[StageStrategies] = []
        for index, one in enumerate(shape):
            start = 0.0
            for number, stage in enumerate(one.stages):
                in_flight = in_flight_micro_batches(
                    Schedule.ONE_FORWARD_ONE_BACKWARD, one.micro_batches, number, len(one.stages), chunks[index]
                )
                context = StageContext(
                    ends[index, number], start, one.micro_batches, in_flight, len(shape) > 1, pipeline_sync
                )
                strategies_by_stage.append(possible_strategies(stage, context, self.shapes, self.cutoff))
                if not strategies_by_stage[-1].bounds:
                    return
                start += min(self.shapes.pass_seconds(stage).forward) / chunks[index]
        self._evaluate_strategies(shape, strategies_by_stage)

    def _can_reduce_in_time(self, shape: Shape) -> bool:
        """Return whether the sum over pipelines may end before the cutoff."""
        if len(shape) == 1:
            return True
        across, cost_context = self._pipeline_sync_seconds_per_byte(shape), self.problem.cost_context
        size = cost_context.gradient_dtype.num_bytes * across
        for one in shape:
            for stage in one.stages:
                untied_values = sum(
                    cost_context.untied_parameters_per_rank(kind, stage.tensor)
                    for kind in map(self.problem.model.kind_of, range(stage.first, stage.end))
                )
                passes = self.shapes.pass_seconds(stage)
                busy = one.micro_batches * max(f + b for f, b in zip(passes.forward, passes.backward, strict=True))
                if busy + untied_values * size / len(stage.rows) >= self.cutoff:
                    return False
        return True

    def _pipeline_sync_seconds_per_byte(self, shape: Shape) -> float:
        """Return a lower bound per byte: one message between two pipelines."""
        if len(shape) == 1:
            return 0.0
        link = self.problem.cost_context.network.link
        nodes = [{device.node for stage in one.stages for device in stage.devices} for one in shape]
        return min(
            1 / max(link((a, b))[1], link((b, a))[1])
            for number, mine in enumerate(nodes)
            for theirs in nodes[number + 1 :]
            for a in mine
            for b in theirs
        )

    def _evaluate_strategies(self, shape: Shape, strategies_by_stage: list[StageStrategies]) -> None:
        """Evaluate products of stage strategies, skipping those with only more recompute than a feasible one."""
        feasible: defaultdict[tuple[Sharding, ...], list[tuple[bool, ...]]] = defaultdict(list)
        pairs = [list(zip(one.bounds, one.choices, strict=True)) for one in strategies_by_stage]
        combinations_by_bound = sorted(
            product(*pairs), key=lambda chosen: (max(b for b, _ in chosen), sum(b for b, _ in chosen))
        )
        for chosen in combinations_by_bound:
            if max(bound for bound, _ in chosen) >= self.cutoff:
                return
            if self._must_stop():
                return
            choices = tuple(choice for _, choice in chosen)
            shardings = tuple(sharding for stage in choices for sharding, _ in stage)
            recompute = tuple(recomputes for stage in choices for _, recomputes in stage)
            if any(all(map(le, other, recompute)) for other in feasible[shardings]):
                continue
            if self._evaluate(shape, choices):
                feasible[shardings].append(recompute)

    def _evaluate(self, shape: Shape, choices: tuple[LayerChoices, ...]) -> bool:
        """Evaluate the plan and return whether it is feasible."""
        left = iter(choices)
        pipelines = tuple(one.to_pipeline(tuple(stage.to_stage(next(left)) for stage in one.stages)) for one in shape)
        plan = Plan(len(self.problem.model.layers), self.problem.global_batch_size, pipelines)
        self.evaluated_count += 1
        candidate = fitting_candidate(self.problem, plan)
        if candidate is None:
            return False
        if candidate.estimate.iteration_seconds < self.cutoff:
            self.found = fastest_first([*self.found, candidate])[: self.top]
        return True
