"""The search `alpa`: every micro-batch size, every order of device types, the best pipelines re-costed exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from trainwright.operator_specs import SpanSpecs
from trainwright.plan import Plan
from trainwright.search.alpa.clustering import cluster_ends
from trainwright.search.alpa.degree_options import DegreeOptions
from trainwright.search.alpa.layer_spans import LayerSpans
from trainwright.search.alpa.mesh_devices import MeshDevices
from trainwright.search.alpa.operator_options import OperatorOptions
from trainwright.search.alpa.options import Intra
from trainwright.search.alpa.pipelines import MicroBatch, Solution
from trainwright.search.alpa.submesh import Line, blocks_of, lines_of
from trainwright.search.choice import check_profiled, why_nothing_fits
from trainwright.search.degrees import divisors
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import Draft, best_of, in_order

GAP_RATIO = 1e-4
"""How much better a pipeline must be to be looked for; the paper's ε leaves a gap of B · ε."""
KEEP_RATIO = 0.05
"""How much worse by Eq. 2 than the best of their size pipelines may be to be costed exactly."""
ROOM_RATIO = 0.5
"""How much worse by Eq. 2 than the best of all sizes they may be: Eq. 2 leaves out what stages send each other."""
COSTED = 8
"""Pipelines of each micro-batch size that are costed exactly."""
COSTED_OF_ORDER = 2
"""And of each order of the device types: Eq. 2 does not know what it takes to sum weights that both ends share."""


def alpa(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Alpa's inter-operator pass, best first by the exact replay.

    What is costed does not depend on how many are wanted. Raises NoFeasiblePlan, with what comes closest, where nothing
    fits.
    """
    del top
    return _search(problem, control).run()


def brief_alpa(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """The same up to the first micro-batch size whose plans are no better than those of the smaller ones."""
    del top
    return _search(problem, control).run(is_brief=True)


def _search(problem: Problem, control: Control) -> _Search:
    check_profiled(problem)
    return _Search(problem, control, LayerSpans(problem.model, cluster_ends(problem.model)))


@dataclass
class _Search:
    problem: Problem
    control: Control
    spans: LayerSpans
    found: list[Candidate] = field(default_factory=list)
    best_seconds: float = math.inf
    """By Eq. 2."""

    def run(self, *, is_brief: bool = False) -> list[Candidate]:
        """Micro-batch sizes from the smallest on, which need the least memory."""
        sizes = divisors(self.problem.global_batch_size)
        for done, rows in enumerate(sizes, start=1):
            batch = MicroBatch(self.problem, self._degrees, rows, self.spans)
            solutions = self._solutions(batch)
            if self._has_graphs and (solutions or not self.found):
                solutions += self._solutions(batch.beside(self._operators))
            before = self._least_seconds
            self._cost(solutions)
            if self.found and self.control.expired():
                break
            if is_brief and before is not None and self._least_seconds == before:
                break
            self._step(done, len(sizes) + 1)
        if not self.found:
            raise why_nothing_fits(self.problem, self._smallest_plans())
        self._step(len(sizes) + 1, len(sizes) + 1)
        return in_order(self.found)

    @cached_property
    def _lines(self) -> tuple[Line, ...]:
        return lines_of(blocks_of(self.problem))

    @cached_property
    def _devices(self) -> MeshDevices:
        return MeshDevices(self.problem)

    @cached_property
    def _degrees(self) -> Intra:
        return DegreeOptions(self.problem, self.spans, self._devices)

    @property
    def _has_graphs(self) -> bool:
        """Whether the model begins as its family's does: graphs of layers are wired for what a family puts first."""
        layers = self.problem.model.layers
        return layers[0] not in layers[1:]

    @cached_property
    def _operators(self) -> Intra:
        return OperatorOptions(self.problem, self.spans, self._devices)

    def _solutions(self, batch: MicroBatch) -> list[Solution]:
        """The best of all orders of the blocks, and some of each."""
        found: list[Solution] = []
        each: list[Solution] = []
        for line in self._lines:
            limit = self.best_seconds * (1 + ROOM_RATIO)
            solved = batch.solutions(line, limit, gap_ratio=GAP_RATIO, keep_ratio=KEEP_RATIO)
            self.best_seconds = min([self.best_seconds, *(one.seconds for one in solved)])
            runnable = [one for one in solved if one.can_run]
            found += runnable
            each += runnable[:COSTED_OF_ORDER]
        best = sorted(found, key=lambda one: one.seconds)[:COSTED]
        return [*best, *(one for one in each if one not in best)]

    def _cost(self, solutions: list[Solution]) -> None:
        operators: dict[Plan, tuple[SpanSpecs | None, ...]] = {}
        for one in solutions:
            operators.setdefault(one.plan(self.problem), one.operators)
        drafts = [Draft(0.0, partial(_given, plan)) for plan in operators]
        silent = replace(self.control, report=None)
        for candidate in best_of(self.problem, drafts, silent, None):
            self.found.append(replace(candidate, operators=operators[candidate.plan]))

    def _step(self, done: int, total: int) -> None:
        self.control.step(done, total, self._least_seconds)

    @property
    def _least_seconds(self) -> float | None:
        """None before the first."""
        return min((candidate.estimate.iteration_seconds for candidate in self.found), default=None)

    def _smallest_plans(self) -> Iterator[Plan]:
        """What needs least memory with the smallest micro-batches: what to show when nothing fits."""
        for line in self._lines:
            found = MicroBatch(self.problem, self._degrees, 1, self.spans).smallest(line)
            if found is not None:
                yield found.plan(self.problem)


def _given(plan: Plan) -> Plan:
    return plan
