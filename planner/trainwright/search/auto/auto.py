"""Our own search: unequal devices by design."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.plan import Plan
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
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem
from trainwright.search.ranking import in_order


@dataclass(frozen=True, slots=True)
class Grain:
    """How finely the programme looks: units of a line, and cuts between layers."""

    units: int
    cuts: int


COARSE, FINE = Grain(12, 13), Grain(24, 32)
FINE_CHOICES = 3
"""Lines and rows that are looked at finely."""
DRAFTS = 16
"""Plans of the programme that are costed exactly."""
LEADERS = 4
"""Candidates that are descended from."""
REPLAYED_DEVICES = 2**15
"""Plans are costed until so many devices were, but at least LEAST_REPLAYS plans and at most MOST_REPLAYS."""
LEAST_REPLAYS, MOST_REPLAYS = 48, 1200


def auto(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates of any shape that the plan document expresses, best first by the exact replay."""
    check_profiled(problem)
    replays = min(max(REPLAYED_DEVICES // len(problem.devices), LEAST_REPLAYS), MOST_REPLAYS)
    judge = Judge(problem, control, replays)
    drafts = sorted(_drafts(problem, control), key=lambda one: one[0])
    for _, plan in drafts[:DRAFTS]:
        judge.cost(plan)
        if judge.known and control.expired():
            break
    for leader in _leaders(judge.feasible()):
        descend(leader, judge, judge.left // 2)
    found = in_order(judge.feasible())
    if not found:
        raise NoFeasiblePlan("no plan fits into memory")
    control.step(1, 1, found[0].estimate.iteration_seconds)
    return found[:top]


def _leaders(candidates: list[Candidate]) -> Iterator[Candidate]:
    """The best of every shape: number of pipelines and stages."""
    shapes: dict[tuple[int, ...], Candidate] = {}
    for candidate in in_order(candidates):
        shapes.setdefault(tuple(len(pipeline.stages) for pipeline in candidate.plan.pipelines), candidate)
    yield from list(shapes.values())[:LEADERS]


def _drafts(problem: Problem, control: Control) -> Iterator[tuple[float, Plan]]:
    """(seconds by the programme, plan): coarse ones of all lines and rows, then fine ones of the best."""
    coarse = Cells(problem, COARSE.cuts)
    choices: list[tuple[float, int, int]] = []
    for number, line in enumerate(lines(problem, COARSE.units)):
        places = Places(coarse, line)
        for rows in divisors(problem.global_batch_size):
            found = list(_plans(places, rows))
            choices += [(seconds, number, rows) for seconds, _ in found[:1]]
            yield from found
    for line in lines(problem, COARSE.units)[:1]:
        if len(set(line.classes)) > 1:
            yield from Several(coarse, line).drafts()
    fine = Cells(problem, FINE.cuts)
    fine_lines: dict[int, Line] = dict(enumerate(lines(problem, FINE.units)))
    for _, number, rows in sorted(choices)[:FINE_CHOICES]:
        if number in fine_lines:
            yield from _plans(Places(fine, fine_lines[number]), rows)


def _plans(places: Places, rows: int) -> Iterator[tuple[float, Plan]]:
    problem = places.cells.problem
    micro_batches = problem.global_batch_size // rows
    tables = LineTables(places, rows, micro_batches)
    for chain in Programme(tables).chains():
        pipeline = pipeline_of(chain, tables, micro_batches)
        yield chain.seconds(micro_batches), Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))
