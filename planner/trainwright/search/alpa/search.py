"""Search `alpa`: every micro-batch size and order of device types, with the best pipelines evaluated by the exact replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from trainwright.cost.stage_tables import StageSpans
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import Plan, divisors
from trainwright.search.alpa.degree_options import DegreeOptions
from trainwright.search.alpa.layer_clusters import cluster_spans
from trainwright.search.alpa.micro_batch_search import MicroBatchSearch, MicroBatchSolution
from trainwright.search.alpa.operator_options import OperatorOptions
from trainwright.search.alpa.stage_candidates import IntraOperatorPass
from trainwright.search.alpa.submeshes import DeviceChain, RepresentativeDevices, device_chains, node_blocks
from trainwright.search.candidates import LazyCandidate, best_of, fastest_first
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.problem import Candidate, Problem, SearchControl
from trainwright.search.uniform.plan_space import check_profiled, infeasibility_error
from trainwright.worker_api.operator_support import operators_refusal, runs_operators

GAP_RATIO = 1e-4
"""Least relative improvement that a pipeline is searched for; the paper's ε leaves a gap of B · ε instead."""
SAME_SIZE_SLACK_RATIO = 0.05
"""Relative excess over the best T (Eq. 2) of the same micro-batch size up to which pipelines are evaluated exactly."""
ALL_SIZES_SLACK_RATIO = 0.5
"""Relative excess over the best T (Eq. 2) of all micro-batch sizes up to which pipelines are searched for.

It is wide because Eq. 2 ignores how messages of different stages share links.
"""
EXACT_EVALUATIONS = 8
"""Number of pipelines evaluated exactly for each micro-batch size."""
EXACT_EVALUATIONS_PER_ORDER = 2
"""Number evaluated besides for each order of device types: Eq. 2 ignores gradient reduction of weights tied between stages."""


def alpa(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return Alpa's plans, fastest first by the exact replay; `top` does not change which ones are evaluated.

    Where degrees do not say what the integer program chose and the worker runs it, a plan with the operators' shardings is
    a candidate, and the plan of the nearest degrees is another one.

    Raises:
        NoFeasiblePlan: Nothing fits; the error names the plans that come closest.
    """
    del top
    is_free = problem.limits.expressible_by is None
    return _search(problem, control, runs_operators=is_free and runs_operators(problem.model)).run()


def alpa_of_degrees(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return Alpa's plans by the nearest degrees alone."""
    del top
    return _search(problem, control).run()


def brief_alpa(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return Alpa's plans of degrees, stopping at the first micro-batch size that does not improve on the smaller ones."""
    del top
    return _search(problem, control).run(is_brief=True)


def _search(problem: Problem, control: SearchControl, *, runs_operators: bool = False) -> _Search:
    check_profiled(problem)
    return _Search(problem, control, cluster_spans(problem.model), runs_operators)


@dataclass
class _Search:
    problem: Problem
    control: SearchControl
    spans: StageSpans
    runs_operators: bool = False
    """Whether candidates are plans with shardings of operators, too."""
    candidates: list[Candidate] = field(default_factory=list)
    best_seconds: float = math.inf
    """Least T of Eq. 2 so far."""

    def run(self, *, is_brief: bool = False) -> list[Candidate]:
        """Search micro-batch sizes in ascending order: the smallest needs the least memory."""
        sizes = divisors(self.problem.global_batch_size)
        for done, rows in enumerate(sizes, start=1):
            batch = MicroBatchSearch(self.problem, self._degree_pass, rows, self.spans)
            solutions = self._solutions(batch)
            is_late = bool(solutions or self.candidates) and self.control.expired()
            if self._has_operator_graphs and (solutions or not self.candidates) and not is_late:
                solutions += self._solutions(batch.combined_with(self._operator_pass))
            before = self._least_seconds
            self._evaluate_exactly(solutions)
            if self.candidates and self.control.expired():
                break
            if is_brief and before is not None and self._least_seconds == before:
                break
            self._report_progress(done, len(sizes) + 1)
        if not self.candidates:
            raise infeasibility_error(self.problem, self._min_memory_plans())
        self._report_progress(len(sizes) + 1, len(sizes) + 1)
        return fastest_first(self.candidates)

    @cached_property
    def _chains(self) -> tuple[DeviceChain, ...]:
        return device_chains(node_blocks(self.problem))

    @cached_property
    def _devices(self) -> RepresentativeDevices:
        return RepresentativeDevices(self.problem)

    @cached_property
    def _degree_pass(self) -> IntraOperatorPass:
        return DegreeOptions(self.problem, self.spans, self._devices)

    @property
    def _has_operator_graphs(self) -> bool:
        """Return whether only the first layer has its kind: that kind's operator graph assumes that no layer precedes it."""
        layers = self.problem.model.layers
        return layers[0] not in layers[1:]

    @cached_property
    def _operator_pass(self) -> IntraOperatorPass:
        return OperatorOptions(self.problem, self.spans, self._devices)

    def _solutions(self, batch: MicroBatchSearch) -> list[MicroBatchSolution]:
        """Return the best pipelines over all block orders, plus the best few of each order; of fewer once the budget is spent."""
        solutions: list[MicroBatchSolution] = []
        each: list[MicroBatchSolution] = []
        for line in self._chains:
            if (solutions or self.candidates) and self.control.expired():
                break
            limit = self.best_seconds * (1 + ALL_SIZES_SLACK_RATIO)
            solved = batch.solutions(line, limit, gap_ratio=GAP_RATIO, keep_ratio=SAME_SIZE_SLACK_RATIO)
            self.best_seconds = min([self.best_seconds, *(solution.seconds for solution in solved)])
            runnable = [solution for solution in solved if solution.can_run]
            solutions += runnable
            each += runnable[:EXACT_EVALUATIONS_PER_ORDER]
        best = sorted(solutions, key=lambda solution: solution.seconds)[:EXACT_EVALUATIONS]
        return [*best, *(solution for solution in each if solution not in best)]

    def _evaluate_exactly(self, solutions: list[MicroBatchSolution]) -> None:
        operators: dict[Plan, tuple[SpanSpecs | None, ...]] = {}
        for solution in solutions:
            plan = with_runtime_choices(solution.plan(self.problem), self.problem.cost_context)
            operators.setdefault(plan, () if self.runs_operators else solution.operators)
            if (sharded := self._plan_with_operators(solution)) is not None:
                operators.setdefault(sharded, ())
        drafts = [LazyCandidate(0.0, partial(_given, plan)) for plan in operators]
        silent = replace(self.control, report=None)
        for candidate in best_of(self.problem, drafts, silent, None):
            self.candidates.append(replace(candidate, operators=operators[candidate.plan]))

    def _plan_with_operators(self, solution: MicroBatchSolution) -> Plan | None:
        """Return the plan with the shardings of operators; None without any, or if limits or the worker refuse them."""
        plan = solution.plan_with_operators(self.problem) if self.runs_operators else None
        if plan is None or not self.problem.limits.allows_plan(plan) or operators_refusal(plan, self.problem.model):
            return None
        return with_runtime_choices(plan, self.problem.cost_context)

    def _report_progress(self, done: int, total: int) -> None:
        self.control.report_progress(done, total, self._least_seconds)

    @property
    def _least_seconds(self) -> float | None:
        """Return the least exact iteration seconds so far, None before the first evaluation."""
        return min((candidate.estimate.iteration_seconds for candidate in self.candidates), default=None)

    def _min_memory_plans(self) -> Iterator[Plan]:
        """Yield the plan of least memory for each block order, at one row per micro-batch, to explain why nothing fits."""
        for line in self._chains:
            solution = MicroBatchSearch(self.problem, self._degree_pass, 1, self.spans).min_memory_solution(line)
            if solution is not None:
                yield solution.plan(self.problem)


def _given(plan: Plan) -> Plan:
    return plan
