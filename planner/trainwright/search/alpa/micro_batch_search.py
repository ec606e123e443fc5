"""Search at one micro-batch size: stage candidates of every submesh, the dynamic program and the resulting plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trainwright.cost.stage_tables import StageSpans
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import Pipeline, Plan, Stage
from trainwright.search.alpa.inter_operator_dp import StageAssignment, boundary_costs_of, no_boundary_costs
from trainwright.search.alpa.stage_candidates import (
    UNLIMITED_STAGES,
    IntraOperatorPass,
    StageCandidates,
    StageStrategy,
    SubmeshOptions,
    concatenate_candidates,
    concatenate_options,
    pareto_candidates,
)
from trainwright.search.alpa.submeshes import DeviceChain, Submesh, SubmeshSlot, place_submeshes
from trainwright.search.alpa.t_max_search import TMaxSearch
from trainwright.search.problem import Problem

_EVENED_PIPELINES = 3
"""Number of best pipelines for which a variant with more even stages is sought as well."""
_LARGEST_STAGE_WEIGHT = 1_000_000
"""Micro-batch count that makes Eq. 2 minimise the largest stage first, then the sum."""


@dataclass(frozen=True)
class MicroBatchSolution:
    """Pipeline found for one micro-batch size.

    Attributes:
        seconds: T of Eq. 2, including messages between stages.
        rows: rows per micro-batch over all replicas of a stage.
        stages: submesh and strategy of each stage, in pipeline order.
    """

    seconds: float
    chain: DeviceChain
    rows: int
    stages: tuple[tuple[Submesh, StageStrategy], ...]

    @property
    def can_run(self) -> bool:
        """Return whether each stage has degrees that the plan document can express, exactly or approximately."""
        return all(strategy.runs for _, strategy in self.stages)

    @property
    def operators(self) -> tuple[SpanSpecs | None, ...]:
        """Return `[stage]` operator specs, None where degrees are exact; empty if they are exact for every stage."""
        operators = tuple(strategy.operators for _, strategy in self.stages)
        return operators if any(specs is not None for specs in operators) else ()

    def plan_with_operators(self, problem: Problem) -> Plan | None:
        """Build the plan with the shardings of operators that degrees do not say.

        None if they say all, or if replicas of such a stage would have uneven rows.
        """
        plan, specs = self.plan(problem), self.operators
        if not specs:
            return None
        stages = []
        for stage, of_stage in zip(plan.stages, specs, strict=True):
            if of_stage is not None and any(len(set(run.rows)) > 1 for run in stage.layers):
                return None
            stages.append(replace(stage, operators=of_stage))
        return replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),))

    def plan(self, problem: Problem) -> Plan:
        """Build the plan on real devices with the nearest expressible degrees."""
        devices = place_submeshes(self.chain, [submesh for submesh, _ in self.stages])
        stages = tuple(Stage(some, strategy.runs) for some, (_, strategy) in zip(devices, self.stages, strict=True))
        micro_batches = problem.global_batch_size // self.rows
        pipeline = Pipeline(micro_batches, self.rows, stages)
        return Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))


@dataclass
class MicroBatchSearch:
    """Search for one micro-batch size, caching what the block orders share.

    Attributes:
        rows: rows per micro-batch over all replicas of a stage.
        keeps_tables: whether a submesh's options stay cached after its candidates are built.
    """

    problem: Problem
    intra: IntraOperatorPass
    rows: int
    spans: StageSpans
    keeps_tables: bool = True
    _options: dict[Submesh, SubmeshOptions | None] = field(default_factory=dict)
    _edges: dict[Submesh, StageCandidates | None] = field(default_factory=dict)
    _strategies: dict[Submesh, Callable[[int, int, int], StageStrategy]] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Return B."""
        return self.problem.global_batch_size // self.rows

    def solutions(
        self, line: DeviceChain, limit_seconds: float, *, gap_ratio: float, keep_ratio: float
    ) -> list[MicroBatchSolution]:
        """Return pipelines on the device chain, best first, none slower than the limit."""
        berths = list(line.slots())
        edges = self.stage_candidates(berths)
        if edges is None:
            return []
        crossings = boundary_costs_of(self.problem, self.spans, line, self.rows)
        slicing = TMaxSearch(
            edges, crossings, self.micro_batches, self._max_stages, gap_ratio, keep_ratio, _EVENED_PIPELINES
        )
        return [self._solution(line, berths, edges, assignment) for assignment in slicing.solve(limit_seconds)]

    def min_memory_solution(self, line: DeviceChain) -> MicroBatchSolution | None:
        """Return the pipeline whose largest stage needs the least memory with one micro-batch in flight."""
        berths = list(line.slots())
        edges = self._candidates_in(berths, self._memory_candidates)
        if edges is None:
            return None
        crossings = no_boundary_costs(self.spans.piece_count, line.size)
        assignments = TMaxSearch(edges, crossings, _LARGEST_STAGE_WEIGHT, self._max_stages, 1e-3).solve()
        return self._solution(line, berths, edges, assignments[0]) if assignments else None

    def combined_with(self, other: IntraOperatorPass) -> MicroBatchSearch:
        """Return a search whose submeshes also have the options of another intra-operator pass."""
        return MicroBatchSearch(self.problem, _CombinedPasses(self, other), self.rows, self.spans, keeps_tables=False)

    @property
    def _max_stages(self) -> int:
        return self.problem.limits.max_stages(self.spans.piece_count)

    def stage_candidates(self, berths: Sequence[SubmeshSlot]) -> StageCandidates | None:
        """Return the stage candidates of all submesh slots, None if no stage can run."""
        return self._candidates_in(berths, self._candidates_of)

    def _candidates_in(
        self, berths: Sequence[SubmeshSlot], edges_of_submesh: Callable[[Submesh], StageCandidates | None]
    ) -> StageCandidates | None:
        candidates = []
        for number, berth in enumerate(berths):
            edges = edges_of_submesh(berth.submesh)
            if edges is not None:
                candidates.append(edges.in_slot(berth.min_devices_before, berth.max_devices_before, number))
        return concatenate_candidates(candidates) if candidates else None

    def options_of(self, submesh: Submesh) -> SubmeshOptions | None:
        if submesh not in self._options:
            options = self._options[submesh] = self.intra.options(submesh, self.rows, self.micro_batches)
            if options is not None:
                self._strategies[submesh] = options.strategy
        return self._options[submesh]

    def _candidates_of(self, submesh: Submesh) -> StageCandidates | None:
        if submesh not in self._edges:
            options = self.options_of(submesh)
            self._edges[submesh] = None if options is None else self._pareto_candidates(submesh, options)
            if not self.keeps_tables:
                del self._options[submesh]
        return self._edges[submesh]

    def _pareto_candidates(self, submesh: Submesh, options: SubmeshOptions) -> StageCandidates:
        most = options.max_remaining_stages(self._memory_bytes(submesh), self.micro_batches)
        return pareto_candidates(
            options.amortised_seconds(self.micro_batches), most, submesh.size, options.message_copies / submesh.nodes
        )

    def _memory_candidates(self, submesh: Submesh) -> StageCandidates | None:
        options = self.options_of(submesh)
        if options is None:
            return None
        needed = (options.state_bytes + options.activation_bytes) / self._memory_bytes(submesh)
        is_open = np.isfinite(options.seconds)
        return pareto_candidates(
            np.where(is_open, needed, np.inf), np.where(is_open, UNLIMITED_STAGES, 0), submesh.size
        )

    def _memory_bytes(self, submesh: Submesh) -> int:
        accelerators = {accelerator.name: accelerator for accelerator in self.problem.cost_context.cluster.accelerators}
        return min(accelerators[name].memory_bytes for name in submesh.accelerators)

    def _solution(
        self, line: DeviceChain, berths: Sequence[SubmeshSlot], edges: StageCandidates, assignment: StageAssignment
    ) -> MicroBatchSolution:
        stages = []
        for number in assignment.candidates:
            submesh = berths[edges.slot[number]].submesh
            place = int(edges.option[number]), int(edges.first[number]), int(edges.end[number])
            stages.append((submesh, self._strategies[submesh](*place)))
        return MicroBatchSolution(assignment.seconds(self.micro_batches), line, self.rows, tuple(stages))


@dataclass(frozen=True)
class _CombinedPasses:
    """Intra-operator pass that joins the cached options of one micro-batch size with those of another pass."""

    cached: MicroBatchSearch
    other: IntraOperatorPass

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> SubmeshOptions | None:
        both = (self.cached.options_of(submesh), self.other.options(submesh, rows, micro_batches))
        given = [options for options in both if options is not None]
        return concatenate_options(given) if given else None
