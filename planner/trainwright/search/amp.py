"""AMP's Algorithm 1: every degree and micro-batch size, placed as Megatron does, layers by dynamic programming."""

from __future__ import annotations

from trainwright.search.choice import Drafting, check_profiled, why_nothing_fits
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import Draft, best_of


def amp(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Algorithm 1, best first by the exact replay.

    What is exact: every choice of degrees and micro-batch size gets the layer assignment that is the optimum of Eq. 5
    among those that fit into memory (AMP itself does not look), and of these plans, one for each choice, the `top`
    fastest by the replay are found; plans whose lower bound rules them out are not replayed. An assignment that is
    worse by Eq. 5 may still be replayed faster: it is not looked at. Raises NoFeasiblePlan, with what comes closest,
    where no assignment fits.
    """
    check_profiled(problem)
    drafting = Drafting(problem)
    drafts: list[Draft] = []
    choices = list(drafting.choices())
    for done, (stages, rows) in enumerate(choices, start=1):
        ends = drafting.assignment(stages, rows)
        if ends is not None:
            drafts.append(drafting.draft(stages, rows, ends))
        control.step(done, 2 * len(choices))
        if drafts and control.expired():
            break
    if not drafts:
        raise why_nothing_fits(problem, drafting.unlimited_plans())
    return best_of(problem, drafts, control, top, done=len(choices))
