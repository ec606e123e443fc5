"""From drafts of plans to candidates, best first: costed exactly, and only as many as it takes to be sure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.cost.estimate import Estimate, estimate_in, fitting_estimate
from trainwright.plan import Plan
from trainwright.search.distinct import Roles
from trainwright.search.protocol import Candidate, Control, Problem

_ROUNDING = 2e-9
"""Relative difference that bounds leave to rounding."""


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
    return _priced(problem, plan, estimate_in(plan, problem.setting))


def fitting_candidate(problem: Problem, plan: Plan) -> Candidate | None:
    """The same where every device has the memory; None, and sooner, where one has not."""
    estimate = fitting_estimate(plan, problem.setting)
    return None if estimate is None else _priced(problem, plan, estimate)


def _priced(problem: Problem, plan: Plan, estimate: Estimate) -> Candidate:
    nodes = [device.node for device in plan.devices]
    price_of = {name: problem.cluster.accelerator_of(Device(name, 0)).price_per_hour for name in dict.fromkeys(nodes)}
    known = [price for node in nodes if (price := price_of[node]) is not None]
    return Candidate(plan, estimate, sum(known) if len(known) == len(nodes) else None)


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Fastest first; equally fast ones by memory."""
    return sorted(candidates, key=lambda c: (c.estimate.iteration_seconds, c.estimate.peak_memory_bytes))


def best_of(  # noqa: PLR0913 - a search's arguments and how far it is
    problem: Problem, drafts: Sequence[Draft], control: Control, top: int | None, *, done: int = 0, ahead: int = 0
) -> list[Candidate]:
    """The `top` best feasible candidates (all of them where top is None), best first, none twice.

    Drafts are costed in the order of their bounds, until what is left cannot be among the best: then the answer is
    the same as if all had been costed. Once the budget is spent the rest is left out, but never before a first
    feasible candidate was found. `done` are the search's steps before this and `ahead` those behind it, for the progress
    that is told.
    """
    return _Contest(problem, control, top).run(drafts, done, done + len(drafts) + ahead)


class _Contest:
    def __init__(self, problem: Problem, control: Control, top: int | None) -> None:
        self.problem, self.control, self.top = problem, control, top
        self.found: dict[Hashable, Candidate] = {}
        self.roles = Roles(problem.cluster)
        self.seen: set[Hashable] = set()

    def run(self, drafts: Sequence[Draft], done: int, total: int) -> list[Candidate]:
        end, needed, best = done + len(drafts), math.inf, None
        for number in sorted(range(len(drafts)), key=lambda number: (drafts[number].bound_seconds, number)):
            draft = drafts[number]
            if self.found and (draft.bound_seconds > needed or self.control.expired()):
                break
            done += 1
            choice = number if draft.choice is None else (draft.choice,)
            if not self._may_be_better(draft, choice):
                continue
            self._cost(draft.make(), choice)
            seconds = sorted(candidate.estimate.iteration_seconds for candidate in self.found.values())
            needed = seconds[self.top - 1] if self.top is not None and len(seconds) >= self.top else math.inf
            best = seconds[0] if seconds else None
            self.control.step(done, total, best)
        if total:
            self.control.step(end, total, best)
        return in_order(self.found.values())

    def _may_be_better(self, draft: Draft, choice: Hashable) -> bool:
        """Whether it may be better than what is known of its choice, by more than rounding."""
        known = self.found.get(choice)
        return known is None or draft.bound_seconds < known.estimate.iteration_seconds * (1 - _ROUNDING)

    def _cost(self, plan: Plan, choice: Hashable) -> None:
        key = self.roles.key(plan)
        if key in self.seen:
            return
        self.seen.add(key)
        candidate = fitting_candidate(self.problem, plan)
        if candidate is not None:
            known = self.found.get(choice)
            self.found[choice] = candidate if known is None else in_order([known, candidate])[0]
