"""From drafts of plans to candidates, best first: costed exactly, and only as many as it takes to be sure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from trainwright.cost.estimate import estimate_in
from trainwright.plan import Plan
from trainwright.search.distinct import Roles
from trainwright.search.protocol import Candidate, Control, Problem


@dataclass(frozen=True)
class Draft:
    """A plan that is not costed yet.

    Attributes:
        bound_seconds: no iteration of it takes less.
        make: the plan; plans of thousands of devices are made only when they are looked at.
        choice: of drafts that share one, but for None, only the best becomes a candidate.
    """

    bound_seconds: float
    make: Callable[[], Plan]
    choice: Hashable = None


def candidate_of(problem: Problem, plan: Plan) -> Candidate:
    """The plan with its estimate and the price of its devices."""
    prices = [problem.cluster.accelerator_of(device).price_per_hour for device in plan.devices]
    known = [price for price in prices if price is not None]
    return Candidate(plan, estimate_in(plan, problem.setting), sum(known) if len(known) == len(prices) else None)


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Fastest first; equally fast ones by memory."""
    return sorted(candidates, key=lambda c: (c.estimate.iteration_seconds, c.estimate.peak_memory_bytes))


def rank(problem: Problem, plans: Iterable[Plan]) -> list[Candidate]:
    """All feasible candidates among these plans, best first, none twice."""
    return best_of(problem, [Draft(0.0, lambda plan=plan: plan) for plan in plans], Control(), None)  # type: ignore[misc]


def best_of(
    problem: Problem, drafts: Sequence[Draft], control: Control, top: int | None, *, done: int = 0
) -> list[Candidate]:
    """The `top` best feasible candidates (all of them where top is None), best first, none twice.

    Drafts are costed in the order of their bounds, until what is left cannot be among the best: then the answer is
    the same as if all had been costed. Once the budget is spent the rest is left out, but never before a first
    feasible candidate was found. `done` are the search's steps before this, for the progress that is told.
    """
    return _Contest(problem, control, top).run(drafts, done)


class _Contest:
    def __init__(self, problem: Problem, control: Control, top: int | None) -> None:
        self.problem, self.control, self.top = problem, control, top
        self.found: dict[Hashable, Candidate] = {}
        self.roles = Roles(problem.cluster)
        self.seen: set[Hashable] = set()

    def run(self, drafts: Sequence[Draft], done: int) -> list[Candidate]:
        total = done + len(drafts)
        needed, best = math.inf, None
        for number in sorted(range(len(drafts)), key=lambda number: (drafts[number].bound_seconds, number)):
            draft = drafts[number]
            if self.found and (draft.bound_seconds > needed or self.control.expired()):
                break
            self._cost(draft.make(), number if draft.choice is None else (draft.choice,))
            seconds = sorted(candidate.estimate.iteration_seconds for candidate in self.found.values())
            needed = seconds[self.top - 1] if self.top is not None and len(seconds) >= self.top else math.inf
            best = seconds[0] if seconds else None
            done += 1
            self.control.step(done, total, best)
        if total:
            self.control.step(total, total, best)
        return in_order(self.found.values())

    def _cost(self, plan: Plan, choice: Hashable) -> None:
        key = self.roles.key(plan)
        if key in self.seen:
            return
        self.seen.add(key)
        candidate = candidate_of(self.problem, plan)
        if candidate.estimate.feasible:
            known = self.found.get(choice)
            self.found[choice] = candidate if known is None else in_order([known, candidate])[0]
