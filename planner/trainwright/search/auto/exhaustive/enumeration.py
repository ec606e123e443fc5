"""The best of all plans of a tiny problem, by looking at every one that a bound does not rule out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from trainwright.cost.memory import in_flight
from trainwright.cost.pace import Paces
from trainwright.cost.pipelines import replay_pipelines
from trainwright.cost.setting import Setting
from trainwright.plan import Plan, Schedule
from trainwright.search.auto.exhaustive.shapes import PipelineShape, Places, Shapes, compositions
from trainwright.search.auto.exhaustive.strategies import Choices, Strategies, Surroundings, strategies
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem
from trainwright.search.ranking import fitting_candidate, in_order

MOST_DEVICES, MOST_LAYERS, MOST_ROWS = 4, 4, 8
"""Beyond these, plans are too many to look at."""
_ROUNDING = 1e-9

Shape = tuple[PipelineShape, ...]


def is_small(problem: Problem) -> bool:
    """Whether `exhaustive` ends soon: mostly within a second, within some where memory or slow links leave much open."""
    return (
        len(problem.devices) <= MOST_DEVICES
        and len(problem.model.layers) <= MOST_LAYERS
        and problem.global_batch_size <= MOST_ROWS
    )


def exhaustive(
    problem: Problem, control: Control, top: int | None, *, most_costed: float = math.inf
) -> list[Candidate]:
    """The `top` fastest feasible plans (None: the fastest), best first; of equal ones any.

    Where many plans are about as fast, as on alike devices with links that cost next to nothing, that is long: once so
    many are costed, it ends with the fastest until then, the likeliest first.

    All plans of one 1F1B schedule: pipelines that share the batch, stages anywhere, one tensor degree and rows in each
    stage, sharding and recompute by layer. Plans that compute more layers again than memory asks for are only listed
    where they cost nothing. Raises NoFeasiblePlan where none fits.
    """
    return _Exhaustive(problem, control, top or 1, most_costed).run()


@dataclass
class _Exhaustive:
    problem: Problem
    control: Control
    top: int
    most_costed: float = math.inf
    found: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes = Shapes(self.problem)
        self.costed = 0

    @property
    def cutoff(self) -> float:
        """Plans that take as long need no look."""
        if len(self.found) < self.top:
            return math.inf
        return self.found[self.top - 1].estimate.iteration_seconds * (1 - _ROUNDING)

    @property
    def _is_over(self) -> bool:
        """Whether what is found is to do."""
        return bool(self.found) and (self.costed >= self.most_costed or self.control.expired())

    @cached_property
    def _sums_behind(self) -> Setting:
        """Where no sum of gradients lengthens the last backward."""
        return replace(self.problem.setting, runtime=replace(self.problem.runtime, overlaps_gradients=False))

    def run(self) -> list[Candidate]:
        shares = sorted(self._shares(), key=lambda one: one[0])
        for done, (bound, places, rows) in enumerate(shares):
            if bound >= self.cutoff or self._is_over:
                break
            for shape in self._shapes_of(places, rows):
                self._look(shape)
            self.control.step(done, len(shares), self.found[0].estimate.iteration_seconds if self.found else None)
        if not self.found:
            raise NoFeasiblePlan("no plan fits: the model needs more memory, or more devices, than there is")
        return in_order(self.found)[: self.top]

    def _shares(self) -> Iterator[tuple[float, tuple[Places, ...], tuple[int, ...]]]:
        """Bound, devices of all pipelines, rows of each in an iteration."""
        constant = self.problem.runtime.constant_seconds
        for places in self.shapes.arrangements():
            for rows in compositions(self.problem.global_batch_size, len(places)):
                each = [self.shapes.pipelines(*one) for one in zip(places, rows, strict=True)]
                if all(each):
                    yield max(shapes[0].bound_seconds for shapes in each) + constant, places, rows

    def _shapes_of(self, places: tuple[Places, ...], rows: tuple[int, ...]) -> list[Shape]:
        """Shapes of all pipelines that may beat what is known, best bound first."""
        cutoff = self.cutoff - self.problem.runtime.constant_seconds
        each = [
            [shape for shape in self.shapes.pipelines(*one) if shape.bound_seconds < cutoff]
            for one in zip(places, rows, strict=True)
        ]
        return sorted(product(*each), key=lambda shape: max(one.bound_seconds for one in shape))

    def _look(self, shape: Shape) -> None:
        """Cost what may be better among all shardings and recomputes of a shape."""
        constant = self.problem.runtime.constant_seconds
        if max(one.bound_seconds for one in shape) + constant >= self.cutoff:
            return
        if self._is_over or not self._may_sum_in_time(shape):
            return
        plain = Plan(
            len(self.problem.model.layers),
            self.problem.global_batch_size,
            tuple(one.pipeline(tuple(stage.plain for stage in one.stages)) for one in shape),
        )
        ends = {key: max(times.ends) for key, times in replay_pipelines(Paces(plain, self._sums_behind)).items()}
        if max(ends.values()) + constant >= self.cutoff:
            return
        across = self._across_per_byte(shape)
        each: list[Strategies] = []
        for index, one in enumerate(shape):
            start = 0.0
            for number, stage in enumerate(one.stages):
                kept = in_flight(Schedule.ONE_FORWARD_ONE_BACKWARD, one.micro_batches, number, len(one.stages))
                around = Surroundings(ends[index, number], start, one.micro_batches, kept, len(shape) > 1, across)
                each.append(strategies(stage, around, self.shapes, self.cutoff))
                if not each[-1].bounds:
                    return
                start += min(self.shapes.passes(stage).forward)
        self._choose(shape, each)

    def _may_sum_in_time(self, shape: Shape) -> bool:
        """Whether summing over pipelines behind the bounds may be over before the cutoff."""
        if len(shape) == 1:
            return True
        across, setting = self._across_per_byte(shape), self.problem.setting
        size = setting.gradient_dtype.num_bytes * across
        for one in shape:
            for stage in one.stages:
                own = sum(
                    setting.values_at(kind, stage.tensor)
                    - (setting.shared_at(kind, stage.tensor) if kind.shared_weight else 0)
                    for kind in map(self.problem.model.kind_of, range(stage.first, stage.end))
                )
                passes = self.shapes.passes(stage)
                busy = one.micro_batches * max(f + b for f, b in zip(passes.forward, passes.backward, strict=True))
                if busy + own * size / len(stage.rows) >= self.cutoff:
                    return False
        return True

    def _across_per_byte(self, shape: Shape) -> float:
        """Of a sum over pipelines: at least one message between two of them."""
        if len(shape) == 1:
            return 0.0
        link = self.problem.setting.fabric.link
        nodes = [{device.node for stage in one.stages for device in stage.devices} for one in shape]
        return min(
            1 / max(link((a, b))[1], link((b, a))[1])
            for number, mine in enumerate(nodes)
            for theirs in nodes[number + 1 :]
            for a in mine
            for b in theirs
        )

    def _choose(self, shape: Shape, each: list[Strategies]) -> None:
        """Cost the products of the stages' strategies; more recompute than a feasible plan has is not faster."""
        enough: list[tuple[Choices, ...]] = []
        pairs = [list(zip(one.bounds, one.choices, strict=True)) for one in each]
        combined = sorted(product(*pairs), key=lambda chosen: (max(b for b, _ in chosen), sum(b for b, _ in chosen)))
        for chosen in combined:
            if max(bound for bound, _ in chosen) >= self.cutoff:
                return
            if self._is_over:
                return
            choices = tuple(choice for _, choice in chosen)
            if any(_only_more_recompute(choices, other) for other in enough):
                continue
            if self._cost(shape, choices):
                enough.append(choices)

    def _cost(self, shape: Shape, choices: tuple[Choices, ...]) -> bool:
        """Whether the plan is feasible."""
        left = iter(choices)
        pipelines = tuple(one.pipeline(tuple(stage.stage(next(left)) for stage in one.stages)) for one in shape)
        plan = Plan(len(self.problem.model.layers), self.problem.global_batch_size, pipelines)
        self.costed += 1
        candidate = fitting_candidate(self.problem, plan)
        if candidate is None:
            return False
        if candidate.estimate.iteration_seconds < self.cutoff:
            self.found = in_order([*self.found, candidate])[: self.top]
        return True


def _only_more_recompute(choices: tuple[Choices, ...], other: tuple[Choices, ...]) -> bool:
    return all(
        mine[0] is theirs[0] and mine[1] >= theirs[1]
        for stage, known in zip(choices, other, strict=True)
        for mine, theirs in zip(stage, known, strict=True)
    )
