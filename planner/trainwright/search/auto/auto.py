"""Our own search: unequal devices by design."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainwright.plan import Plan
from trainwright.search.amp import amp
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.descent import Judge, descend
from trainwright.search.auto.drafting import pipeline_of
from trainwright.search.auto.line import Line, lines
from trainwright.search.auto.places import Places
from trainwright.search.auto.programme import Programme
from trainwright.search.auto.several import Several
from trainwright.search.auto.tables import LineTables
from trainwright.search.choice import check_profiled
from trainwright.search.degrees import divisors
from trainwright.search.galvatron.bmw import galvatron_bmw
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem, Search
from trainwright.search.ranking import in_order


@dataclass(frozen=True, slots=True)
class Grain:
    """How finely the programme looks: units of a line, cuts between layers, orders of the kinds of nodes."""

    units: int
    cuts: int
    orders: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at.

    Attributes:
        patience: sizes of micro-batches in a row that may be worse before a line is left.
        choices: lines and sizes, the best by a coarse look, that are looked at finely.
    """

    coarse: Grain
    fine: Grain
    patience: int
    choices: int


FEW, MANY = Effort(Grain(16, 13, 24), Grain(16, 28, 24), 100, 8), Effort(Grain(12, 13, 6), Grain(24, 32, 6), 2, 3)
FEW_DEVICES = 16
"""Up to so many, the first effort."""
SEEDS: tuple[tuple[Search, int], ...] = ((amp, 64), (galvatron_bmw, 16))
"""Searches whose best plans are descended from, up to so many devices."""
DRAFTS = 24
"""Plans of the programme that are costed exactly."""
LEADERS = 4
"""Candidates that are descended from."""
REPLAYED_DEVICES = 2**14
"""Plans are costed until so many devices were, but at least LEAST_REPLAYS plans and at most MOST_REPLAYS."""
LEAST_REPLAYS, MOST_REPLAYS = 64, 1200
_STEPS = 100
"""What progress is counted in; so many are the drafts, as many the descent."""


def auto(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates of any shape that the plan document expresses, best first by the exact replay."""
    check_profiled(problem)
    return _Run(problem, control).candidates()[:top]


class _Run:
    def __init__(self, problem: Problem, control: Control) -> None:
        self.problem, self.control = problem, control
        replays = min(max(REPLAYED_DEVICES // len(problem.devices), LEAST_REPLAYS), MOST_REPLAYS)
        self.judge = Judge(problem, control, replays)
        self.drafts: list[tuple[float, Plan]] = []

    def candidates(self) -> list[Candidate]:
        for _ in self._draft(FEW if len(self.problem.devices) <= FEW_DEVICES else MANY):
            if self._is_over:
                break
        self._cost_drafts()
        self._seed()
        for number, leader in enumerate(_leaders(self.judge.feasible())):
            if self.judge.is_over:
                break
            descend(leader, self.judge, self.judge.left // 2)
            self._step(_STEPS + _STEPS * (number + 1) // LEADERS)
        found = in_order(self.judge.feasible())
        if not found:
            raise NoFeasiblePlan("no plan fits into memory")
        self._step(2 * _STEPS)
        return found

    def _cost_drafts(self) -> None:
        """The best drafts, those of every number of stages first."""
        drafts = sorted(self.drafts, key=lambda one: one[0])
        first: dict[tuple[int, ...], Plan] = {}
        for _, plan in drafts:
            first.setdefault(tuple(len(pipeline.stages) for pipeline in plan.pipelines), plan)
        for plan in (*list(first.values())[: DRAFTS // 3], *(plan for _, plan in drafts[:DRAFTS])):
            self.judge.cost(plan)
            if self._is_over:
                break

    def _seed(self) -> None:
        for search, most_devices in SEEDS:
            if len(self.problem.devices) <= most_devices and not self._is_over:
                try:
                    found = search(self.problem, replace(self.control, report=None), 2)
                except NoFeasiblePlan:
                    continue
                for candidate in found[:2]:
                    self.judge.add(candidate)

    @property
    def _is_over(self) -> bool:
        return self.control.expired() and bool(self.judge.feasible())

    def _step(self, done: int) -> None:
        best = min((one.estimate.iteration_seconds for one in self.judge.feasible()), default=None)
        self.control.step(done, 2 * _STEPS, best)

    def _draft(self, effort: Effort) -> Iterator[None]:
        """Coarse drafts of all lines and rows, then of several pipelines, then fine ones of the best; one step at a time."""
        coarse, fine = effort.coarse, effort.fine
        cells = Cells(self.problem, coarse.cuts)
        choices: list[tuple[float, int, int]] = []
        coarse_lines = lines(self.problem, coarse.units, coarse.orders)
        sizes = divisors(self.problem.global_batch_size)
        for number, line in enumerate(coarse_lines):
            places = Places(cells, line)
            known: dict[int, float] = {}
            for index in _outwards(known, len(sizes), effort.patience):
                found = list(self._plans(places, sizes[index], is_rough=True))
                known[index] = found[0][0] if found else float("inf")
                choices += [(seconds, number, sizes[index]) for seconds, _ in found[:1]]
                if not self.drafts and found:
                    self.judge.cost(found[0][1])
                self.drafts += found
                yield
            self._step(_STEPS * (number + 1) // (2 * len(coarse_lines)))
        if len(set(coarse_lines[0].classes)) > 1:
            self.drafts += Several(cells, coarse_lines[0]).drafts()
            yield
        cells = Cells(self.problem, fine.cuts)
        fine_lines: dict[int, Line] = dict(enumerate(lines(self.problem, fine.units, fine.orders)))
        for _, number, rows in sorted(choices)[: effort.choices]:
            if number in fine_lines:
                self.drafts += self._plans(Places(cells, fine_lines[number]), rows)
                yield

    def _plans(self, places: Places, rows: int, *, is_rough: bool = False) -> Iterator[tuple[float, Plan]]:
        problem = self.problem
        micro_batches = problem.global_batch_size // rows
        tables = LineTables(places, rows, micro_batches)
        for chain in Programme(tables, is_rough).chains():
            pipeline = pipeline_of(chain, tables, micro_batches)
            yield chain.seconds(micro_batches), Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))


def _outwards(known: dict[int, float], count: int, patience: int) -> Iterator[int]:
    """Indices from the middle on in both directions, each until `patience` in a row were worse than the best known."""
    start = count // 2
    yield start
    for way in (1, -1):
        index, worse = start + way, 0
        while 0 <= index < count and worse < patience:
            best = min(known.values())
            yield index
            worse = 0 if known[index] < best else worse + 1
            index += way


def _leaders(candidates: list[Candidate]) -> Iterator[Candidate]:
    """The best of every shape: number of pipelines and stages."""
    shapes: dict[tuple[int, ...], Candidate] = {}
    for candidate in in_order(candidates):
        shapes.setdefault(tuple(len(pipeline.stages) for pipeline in candidate.plan.pipelines), candidate)
    yield from list(shapes.values())[:LEADERS]
