"""AMP's Algorithm 1: every degree and micro-batch size, placed as Megatron does, layers by dynamic programming."""

from __future__ import annotations

from dataclasses import replace

from trainwright.search.choice import Drafting, check_profiled, why_nothing_fits
from trainwright.search.node_order import device_orders
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import Draft, best_of

MOST_ASSIGNMENTS = 640
"""Choices times orders of the nodes; where there are many choices, fewer orders are tried."""


def amp(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Algorithm 1, best first by the exact replay.

    What is exact: on every order of the nodes that is tried (`device_orders`; AMP takes the one of its host file),
    every choice of degrees and micro-batch size gets the layer assignment that is the optimum of Eq. 5 among those
    that fit into memory (AMP itself does not look). Of these plans, the best order for each choice, the `top` fastest
    by the replay are found; plans whose lower bound rules them out are not replayed. An assignment that is worse by
    Eq. 5 may still be replayed faster: it is not looked at. So the least of Eq. 5 never grows with a faster device or
    link or more memory, while the replayed seconds may, rarely. Raises NoFeasiblePlan, with what comes closest, where
    no assignment fits.
    """
    check_profiled(problem)
    first = Drafting.of(problem)
    choices = sum(1 for _ in first.choices())
    orders = device_orders(problem, MOST_ASSIGNMENTS // max(choices, 1))
    draftings = [first, *(Drafting(problem, order) for order in orders[1:])]
    drafts: list[Draft] = []
    done, total = 0, len(draftings) * choices
    for drafting in draftings:
        for stages, rows in drafting.choices():
            ends = drafting.assignment(stages, rows)
            if ends is not None:
                choice = stages.placement.shape, rows
                drafts.append(replace(drafting.draft(stages, rows, ends), choice=choice))
            done += 1
            control.step(done, 2 * total)
            if drafts and control.expired():
                return best_of(problem, drafts, control, top, done=done)
    if not drafts:
        raise why_nothing_fits(problem, first.unlimited_plans())
    return best_of(problem, drafts, control, top, done=done)
