"""A first answer at once."""

from __future__ import annotations

from itertools import islice

from trainwright.search.auto.run import Run
from trainwright.search.auto.seeds import amp_seeds
from trainwright.search.choice import Drafting
from trainwright.search.lean import lean_plans
from trainwright.search.megatron import megatron_drafts
from trainwright.search.paced import paced_plans
from trainwright.search.packed import packed_plans
from trainwright.search.protocol import Control
from trainwright.search.ranking import Draft, best_of, candidate_of, fitting_candidate


def begin(run: Run) -> None:
    """The usual heuristic's, or where that does not fit layers dealt by memory; then AMP's.

    Where memory is short, one whose stages are as fast as it allows besides.
    """
    if not _usual(run):
        _spare_memory(run)
    if run.found:
        run.step(0)
    for plan in paced_plans(run.problem) if run.is_deep and not run.is_over else ():
        run.judge.cost(plan)
        run.step(0)
    if not run.is_over:
        for candidate in amp_seeds(run.problem, run.control, lambda: run.is_over, lambda best: run.step(0, best)):
            run.judge.add(candidate)
        run.step(0)


def _usual(run: Run) -> bool:
    """Megatron's best; the first that fits is told before the others are looked at. Whether there is one."""
    drafts: list[Draft] = []
    for draft in megatron_drafts(Drafting.of(run.problem), run.control):
        if not drafts and (first := fitting_candidate(run.problem, draft.make())) is not None:
            run.early = [first]
            run.step(0)
        drafts.append(draft)
    if not drafts:
        return False
    run.judge.add(best_of(run.problem, drafts, Control(), 1)[0])
    run.early = []
    return True


def _spare_memory(run: Run) -> None:
    for plan in packed_plans(run.problem):
        run.judge.cost(plan)
        run.step(0)
    if run.has_none:
        run.early = [candidate_of(run.problem, plan) for plan in islice(lean_plans(run.problem), 1)]
