"""Galvatron-Base (Algorithm 1): a balanced partition for every pipeline degree, strategies by layer."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.search.galvatron.partitions import CutTables, even_partition, memory_balanced_partition
from trainwright.search.galvatron.pipelines import PipelineSolution
from trainwright.search.galvatron.workflow import optimise
from trainwright.search.protocol import Candidate, Control, Problem


def galvatron_base(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Algorithm 1 for a given batch, best first by the exact replay.

    The paper takes the partition as given, by layers, time or memory, and one number of micro-batches; here all three
    balances and all divisors of the batch are tried. Raises NoFeasiblePlan where nothing fits.
    """
    del top
    return optimise(problem, control, (balanced_solutions,))


def balanced_solutions(tables: CutTables, limit_seconds: float) -> Iterator[PipelineSolution]:
    """Solutions of the partitions that balance layers, time and memory."""
    del limit_seconds
    cut = tables.cut
    partitions = (even_partition(cut), tables.time_balanced(), memory_balanced_partition(cut))
    for ends in dict.fromkeys(partitions):
        solution = cut.solution(ends) if ends is not None else None
        if solution is not None:
            yield solution
