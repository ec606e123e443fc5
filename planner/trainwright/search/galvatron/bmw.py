"""Galvatron-BMW (Algorithm 2): partitions that balance time and memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from trainwright.search.galvatron.adjustment import adjusted, descended
from trainwright.search.galvatron.base import balanced_solutions
from trainwright.search.galvatron.partitions import CutTables, fitting_partition, memory_balanced_partition
from trainwright.search.galvatron.pipelines import PipelineSolution
from trainwright.search.galvatron.workflow import optimise
from trainwright.search.protocol import Candidate, Control, Problem

DESCENTS = 8
"""Moves of a boundary layer that are tried from the best partition found, at most."""


def galvatron_bmw(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Algorithm 2 for a given batch, best first by the exact replay.

    Beside the paper's queue of adjusted partitions: the partitions that Eq. 8 finds best over tables of all stages,
    and their neighbours. Pipeline degree 1, which Algorithm 2 leaves to Galvatron-Base, is included. Raises
    NoFeasiblePlan where nothing fits.
    """
    del top
    return optimise(problem, control, (balanced_solutions, adjusted_solutions), descends=True)


def adjusted_solutions(tables: CutTables, limit_seconds: float) -> Iterator[PipelineSolution]:
    """The solutions of Galvatron-Base, those of the paper's queue, and better ones found from tables."""
    cut = tables.cut
    found = list(balanced_solutions(tables, limit_seconds))
    if len(cut.devices) > 1 and tables.lower_bound <= limit_seconds:
        found += _better(tables, limit_seconds, found)
    yield from {solution.ends: solution for solution in found}.values()


def _better(tables: CutTables, limit_seconds: float, known: list[PipelineSolution]) -> list[PipelineSolution]:
    cut = tables.cut
    free, fitting = tables.best(), fitting_partition(cut)
    if fitting is not None and fitting.seconds > limit_seconds:
        return []
    tried = (cut.solution(partition.ends) for partition in (free, fitting) if partition is not None)
    found = [solution for solution in tried if solution is not None]
    start = memory_balanced_partition(cut)
    if start is not None:
        found += adjusted(cut, start, tables.time_balanced())
    if known or found:
        found.append(descended(cut, min([*known, *found], key=attrgetter("seconds")), DESCENTS))
    return found
