"""What Galvatron-Base and Galvatron-BMW share: every pipeline degree and micro-batch count, solutions costed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.plan import Plan
from trainwright.search.choice import check_profiled, why_nothing_fits
from trainwright.search.galvatron.descent import descend
from trainwright.search.galvatron.exploration import Exploration, Explore
from trainwright.search.galvatron.partitions import CutTables, even_partition
from trainwright.search.galvatron.pipelines import PipelineSolution, StageSolution, Workbench
from trainwright.search.protocol import Candidate, Control, Problem


def optimise(
    problem: Problem, control: Control, explorers: Sequence[Explore], *, descends: bool = False
) -> list[Candidate]:
    """Candidates of one explorer after the other, best first by the exact replay, which may improve the best of them.

    What is costed does not depend on how many are wanted. Raises NoFeasiblePlan, with what comes closest, where nothing
    fits.
    """
    check_profiled(problem)
    tables = [CutTables(cut) for cut in Workbench(problem).pipelines()]
    exploration = Exploration(problem, control, tables, steps=len(explorers) * len(tables) + 1)
    for explore in explorers:
        exploration.run(explore)
    if not exploration.found:
        raise why_nothing_fits(problem, _smallest_plans(problem))
    if descends:
        descend(exploration)
    exploration.step(exploration.steps)
    return exploration.ranked()


def _smallest_plans(problem: Problem) -> Iterator[Plan]:
    """For every cut the plan whose layers take the strategy with the least memory: what to show when nothing fits."""
    bench = Workbench(problem)
    layers = bench.sequence.layers
    for cut in bench.pipelines():
        ends = even_partition(cut)
        if ends is None:
            continue
        chosen = []
        for stage, first, end in zip(cut.stages, (0, *ends), ends, strict=False):
            held = stage.forward_bytes + stage.peak_bytes
            members = bench.sequence.members(0, layers)[first:end]
            chosen.append(StageSolution(tuple(int(held[member].argmin()) for member in members), 0.0, 0.0, 0.0))
        yield cut.plan(PipelineSolution(ends, tuple(chosen), 0.0))
