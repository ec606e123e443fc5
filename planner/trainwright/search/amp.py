"""AMP's Algorithm 1: every degree and micro-batch size, placed as Megatron does, layers by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from trainwright.search.choice import Drafting, check_profiled, degrees_of, why_nothing_fits
from trainwright.search.degrees import micro_batch_sizes
from trainwright.search.node_order import device_orders
from trainwright.search.polish import Polish
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import Draft, best_of, fitting_candidate, in_order
from trainwright.search.stages import Stages

MOST_ASSIGNMENTS = 640
"""Choices times orders of the nodes; where there are many choices, fewer orders are tried."""
FEW_PLANS = 10_000
"""Where there are no more plans – assignments of all choices in all orders of the nodes –, all are looked at."""
LEADERS = 6
"""How many of the best choices are polished."""
POLISH_TRIES = 24
"""Replays for each of them at most."""
POLISH_DEVICES = 2**13
"""On large clusters a leader gets only as many replays as have this many devices."""
PATIENCE = 6
"""Replays in vain after which a leader is left as it is."""


def amp(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Algorithm 1, the best of each choice of degrees and micro-batch size, best first by the replay.

    On every order of the nodes that is tried (`device_orders`; AMP takes the one of its host file), a choice gets the
    layer assignment that is the optimum of Eq. 5 among those that fit into memory (AMP itself does not look). Of these
    plans the best order for each choice, the `top` fastest by the replay are found; plans whose lower bound rules them
    out are not replayed.

    Two things the paper has not, as Eq. 5 ranks assignments otherwise than the replay: the best choices are polished
    (`Polish`), which only ever makes them faster by the replay. And where there are no more than FEW_PLANS plans, all
    assignments in all orders take the place of Eq. 5's: the answer is then the optimum, so that a faster link or device
    or more memory never makes it slower. Elsewhere it may, rarely. Raises NoFeasiblePlan, with what comes closest,
    where no assignment fits.
    """
    check_profiled(problem)
    search = _Algorithm1(problem, control)
    drafts = search.drafts()
    if search.tries_everything:
        return best_of(problem, drafts, control, top, done=search.done)
    wanted = None if top is None else max(top, LEADERS)
    ranked = best_of(problem, drafts, control, wanted, done=search.done, ahead=LEADERS)
    return search.polished(ranked, search.done + len(drafts))


def count_plans(problem: Problem) -> int:
    """Layer assignments of all choices in all orders of the nodes, equal nodes told apart.

    It hangs on the numbers of nodes, devices, layers and rows alone: not on how fast or large anything is.
    """
    layers = len(problem.model.layers)
    choices = (
        math.comb(layers - 1, degrees.pipeline - 1) * len(micro_batch_sizes(problem.global_batch_size, degrees.data))
        for degrees in degrees_of(problem)
    )
    return sum(choices) * math.factorial(len(problem.nodes))


class _Algorithm1:
    """One run of the search; `done` counts its steps."""

    def __init__(self, problem: Problem, control: Control) -> None:
        self.problem, self.control = problem, control
        first = Drafting.of(problem)
        self.choices, self.done = sum(1 for _ in first.choices()), 0
        # Where no degrees fit there are no plans, however many orders the nodes have.
        self.tries_everything = 0 < count_plans(problem) <= FEW_PLANS
        most = math.factorial(len(problem.nodes)) if self.tries_everything else MOST_ASSIGNMENTS // max(self.choices, 1)
        orders = device_orders(problem, most)
        self.draftings = [first, *(first.reordered(order) for order in orders[1:])]

    def drafts(self) -> list[Draft]:
        """Of all choices in all orders; raises NoFeasiblePlan where there is none."""
        found: list[Draft] = []
        first_seconds: float | None = None
        total = len(self.draftings) * self.choices
        for drafting in self.draftings:
            for stages, rows in drafting.choices():
                had_some = bool(found)
                found += self._of_choice(drafting, stages, rows)
                if found and not had_some:
                    first_seconds = self._seconds(found[0])
                self.done += 1
                self.control.step(self.done, 2 * total + LEADERS, first_seconds)
                if found and self.control.expired():
                    return found
        if not found:
            raise why_nothing_fits(self.problem, self.draftings[0].unlimited_plans())
        return found

    def _of_choice(self, drafting: Drafting, stages: Stages, rows: int) -> Iterator[Draft]:
        choice = stages.placement.shape, rows
        if self.tries_everything:
            return drafting.drafts(stages, rows, drafting.assignments(stages, rows), choice)
        ends = drafting.assignment(stages, rows)
        return iter(()) if ends is None else drafting.drafts(stages, rows, np.array([ends]), choice)

    def _seconds(self, draft: Draft) -> float | None:
        """What is told while the others are drafted; None where memory is lacking after all."""
        candidate = fitting_candidate(self.problem, draft.make())
        return None if candidate is None else candidate.estimate.iteration_seconds

    def polished(self, candidates: list[Candidate], done: int) -> list[Candidate]:
        """The candidates, best first again, the first of them polished; `done` are the steps before this."""
        drafting_of = {drafting.order.devices: drafting for drafting in self.draftings}
        tries = min(POLISH_TRIES, POLISH_DEVICES // len(self.problem.devices))
        leaders, rest = candidates[:LEADERS], candidates[LEADERS:]
        for index, leader in enumerate(leaders):
            if self.control.expired():
                break
            leaders[index] = Polish(drafting_of[leader.plan.devices], tries, PATIENCE).descend(leader)
            best = min(candidate.estimate.iteration_seconds for candidate in leaders)
            self.control.step(done + index + 1, done + LEADERS, best)
        return in_order([*leaders, *rest])
