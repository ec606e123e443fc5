"""Pipelines of one micro-batch size: tables of every submesh, the programme over them, and the plans that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainwright.operator_specs import SpanSpecs
from trainwright.plan import Pipeline, Plan, Stage
from trainwright.search.alpa.crossings import crossings_of, no_crossings
from trainwright.search.alpa.edges import Edges, edges_of, together
from trainwright.search.alpa.layer_spans import LayerSpans
from trainwright.search.alpa.options import UNLIMITED, Intra, Options, StageStrategy, joined
from trainwright.search.alpa.placement import placed
from trainwright.search.alpa.slicing import Slicing
from trainwright.search.alpa.stage_programme import Assignment
from trainwright.search.alpa.submesh import Berth, Line, Submesh
from trainwright.search.protocol import Problem

_EVENED = 3
"""Pipelines of which the most even one is looked at, too."""
_MEMORY_ALONE = 1_000_000
"""Weight of the largest stage beside the sum of all."""


@dataclass(frozen=True)
class Solution:
    """A pipeline that the programme found.

    Attributes:
        seconds: T of Eq. 2, messages between stages included.
        stages: (submesh, how it runs its layers) in order.
    """

    seconds: float
    line: Line
    rows: int
    stages: tuple[tuple[Submesh, StageStrategy], ...]

    @property
    def can_run(self) -> bool:
        """Whether there are degrees of the plan document for every stage, if only the nearest."""
        return all(strategy.runs for _, strategy in self.stages)

    @property
    def operators(self) -> tuple[SpanSpecs | None, ...]:
        """[stage] what was found operator by operator, None where degrees say it all; empty where they do everywhere."""
        found = tuple(strategy.operators for _, strategy in self.stages)
        return found if any(one is not None for one in found) else ()

    def plan(self, problem: Problem) -> Plan:
        """On real devices, with the degrees that come nearest."""
        devices = placed(self.line, [submesh for submesh, _ in self.stages])
        stages = tuple(Stage(some, strategy.runs) for some, (_, strategy) in zip(devices, self.stages, strict=True))
        micro_batches = problem.global_batch_size // self.rows
        pipeline = Pipeline(micro_batches, self.rows, stages)
        return Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))


@dataclass
class MicroBatch:
    """One micro-batch size; what orders of the blocks share is computed once.

    Attributes:
        rows: of a micro-batch, over all replicas of a stage.
        keeps_tables: whether the options of submeshes are kept for others to take.
    """

    problem: Problem
    intra: Intra
    rows: int
    spans: LayerSpans
    keeps_tables: bool = True
    _options: dict[Submesh, Options | None] = field(default_factory=dict)
    _edges: dict[Submesh, Edges | None] = field(default_factory=dict)
    _strategies: dict[Submesh, Callable[[int, int, int], StageStrategy]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """B."""
        return self.problem.global_batch_size // self.rows

    def solutions(self, line: Line, limit_seconds: float, *, gap_ratio: float, keep_ratio: float) -> list[Solution]:
        """The best pipelines of the line, best first; none that take more than the limit."""
        berths = list(line.berths())
        edges = self.edges_along(berths)
        if edges is None:
            return []
        crossings = crossings_of(self.problem, self.spans, line, self.rows)
        slicing = Slicing(edges, crossings, self.count, self._most_stages, gap_ratio, keep_ratio, _EVENED)
        return [self._solution(line, berths, edges, found) for found in slicing.solve(limit_seconds)]

    def smallest(self, line: Line) -> Solution | None:
        """The pipeline whose largest stage needs least memory for one micro-batch: what to show when nothing fits."""
        berths = list(line.berths())
        edges = self._along(berths, self._edges_by_memory)
        if edges is None:
            return None
        crossings = no_crossings(len(self.spans.ends), line.size)
        found = Slicing(edges, crossings, _MEMORY_ALONE, self._most_stages, 1e-3).solve()
        return self._solution(line, berths, edges, found[0]) if found else None

    def beside(self, other: Intra) -> MicroBatch:
        """The same where every submesh has the options of another pass, too."""
        return MicroBatch(self.problem, _Both(self, other), self.rows, self.spans, keeps_tables=False)

    @property
    def _most_stages(self) -> int:
        return self.problem.limits.max_pipeline_degree or len(self.spans.ends)

    def edges_along(self, berths: Sequence[Berth]) -> Edges | None:
        """What the programme chooses from; None where nothing can run anywhere."""
        return self._along(berths, self._edges_of)

    def _along(self, berths: Sequence[Berth], edges_of_submesh: Callable[[Submesh], Edges | None]) -> Edges | None:
        found = []
        for number, berth in enumerate(berths):
            edges = edges_of_submesh(berth.submesh)
            if edges is not None:
                found.append(edges.at(berth.low, berth.high, number))
        return together(found) if found else None

    def options_of(self, submesh: Submesh) -> Options | None:
        """The options of a submesh."""
        if submesh not in self._options:
            options = self._options[submesh] = self.intra.options(submesh, self.rows, self.count)
            if options is not None:
                self._strategies[submesh] = options.strategy
        return self._options[submesh]

    def _edges_of(self, submesh: Submesh) -> Edges | None:
        if submesh not in self._edges:
            options = self.options_of(submesh)
            self._edges[submesh] = None if options is None else self._front(submesh, options)
            if not self.keeps_tables:
                del self._options[submesh]
        return self._edges[submesh]

    def _front(self, submesh: Submesh, options: Options) -> Edges:
        most = options.most_stages(self._memory_bytes(submesh), self.count)
        return edges_of(options.amortised(self.count), most, submesh.size, options.copies / submesh.nodes)

    def _edges_by_memory(self, submesh: Submesh) -> Edges | None:
        options = self.options_of(submesh)
        if options is None:
            return None
        needed = (options.state_bytes + options.activation_bytes) / self._memory_bytes(submesh)
        is_open = np.isfinite(options.seconds)
        return edges_of(np.where(is_open, needed, np.inf), np.where(is_open, UNLIMITED, 0), submesh.size)

    def _memory_bytes(self, submesh: Submesh) -> int:
        accelerators = {one.name: one for one in self.problem.setting.cluster.accelerators}
        return min(accelerators[name].memory_bytes for name in submesh.accelerators)

    def _solution(self, line: Line, berths: Sequence[Berth], edges: Edges, found: Assignment) -> Solution:
        stages = []
        for number in found.edges:
            submesh = berths[edges.berth[number]].submesh
            place = int(edges.option[number]), int(edges.first[number]), int(edges.end[number])
            stages.append((submesh, self._strategies[submesh](*place)))
        return Solution(found.seconds(self.count), line, self.rows, tuple(stages))


@dataclass(frozen=True)
class _Both:
    """The options that are known of a micro-batch size, and those of another intra-operator pass."""

    known: MicroBatch
    other: Intra

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> Options | None:
        found = (self.known.options_of(submesh), self.other.options(submesh, rows, micro_batches))
        given = [one for one in found if one is not None]
        return joined(given) if given else None
