"""From a plan to a better one by small moves, each costed exactly."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field

from trainwright.plan import Plan
from trainwright.search.auto.moves import NEIGHBOURHOODS, places
from trainwright.search.auto.relief import relieved
from trainwright.search.distinct import Roles
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import fitting_candidate

_WHOLE, _LACKING = 1.0, 0.375
"""What costing a plan that fits, and one that does not, counts."""
LEAST_GAIN = 1e-6
"""Relative; moves that gain less are not gone on from."""


@dataclass
class Judge:
    """Costs plans exactly, each once.

    Attributes:
        left: how many plans may still be costed; those that do not fit, which is known sooner, count in part.
    """

    problem: Problem
    control: Control
    left: float
    known: dict[Hashable, Candidate | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._roles = Roles(self.problem.cluster)

    def cost(self, plan: Plan) -> Candidate | None:
        """The candidate; None where it cannot run, is over the limits, or was costed before."""
        return self._cost(self._roles.key(plan), plan)

    def _cost(self, key: Hashable, plan: Plan) -> Candidate | None:
        if key in self.known or self.left <= 0 or not self._allowed(plan):
            return None
        try:
            found = self.known[key] = fitting_candidate(self.problem, plan)
        except ValueError:  # a layer without a profile at this degree on these devices
            found = self.known[key] = None
        self.left -= _WHOLE if found is not None else _LACKING
        return found

    def cost_relieved(self, plan: Plan) -> Candidate | None:
        """The candidate or, where memory is lacking, that with more layers computed again; None as above."""
        key = self._roles.key(plan)
        if key in self.known:
            return None
        found = self._cost(key, plan)
        if found is None and key in self.known:
            try:
                leaner = relieved(plan, self.problem.setting)
            except ValueError:  # as in `cost`
                return None
            found = None if leaner is None else self.cost(leaner)
        return found

    def knows(self, plan: Plan) -> bool:
        """Whether it was costed before."""
        return self._roles.key(plan) in self.known

    def add(self, candidate: Candidate) -> None:
        """One that was costed elsewhere."""
        self.known.setdefault(self._roles.key(candidate.plan), candidate)

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or self.control.expired()

    def _allowed(self, plan: Plan) -> bool:
        limits = self.problem.limits
        for pipeline in plan.pipelines:
            if limits.max_pipeline_degree is not None and len(pipeline.stages) > limits.max_pipeline_degree:
                return False
            for stage in pipeline.stages:
                for run in stage.layers:
                    if limits.max_tensor_degree is not None and run.tensor > limits.max_tensor_degree:
                        return False
                    if limits.max_data_degree is not None and run.data > limits.max_data_degree:
                        return False
        return True

    def feasible(self) -> list[Candidate]:
        return [candidate for candidate in self.known.values() if candidate is not None]


def descend(start: Candidate, judge: Judge, tries: float) -> Candidate:
    """The candidate or a faster one; at most `tries` plans are costed.

    Kinds of moves take turns. A kind that helped is asked again at once; the descent ends when none helps.
    """
    here, last = start, max(judge.left - tries, 0)
    idle = 0
    number = 0
    while idle < len(NEIGHBOURHOODS) and judge.left > last and not judge.is_over:
        better = _first_better(here, judge, number, last)
        if better is None:
            number, idle = (number + 1) % len(NEIGHBOURHOODS), idle + 1
        else:
            here, idle = better, 0
    return here


def _first_better(here: Candidate, judge: Judge, number: int, last: float) -> Candidate | None:
    for move in NEIGHBOURHOODS[number](places(here.plan, judge.problem)):
        if judge.left <= last or judge.is_over:
            return None
        try:
            plan = move()
        except ValueError:  # a replica would be left without rows
            continue
        found = judge.cost_relieved(plan)
        if found is not None and found.estimate.iteration_seconds < here.estimate.iteration_seconds * (1 - LEAST_GAIN):
            return found
    return None


@dataclass
class Disturbances:
    """Leads away from plans that no small move betters: two moves at random, whatever they cost."""

    problem: Problem
    seed: int

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - not for secrets

    def of(self, here: Candidate, judge: Judge) -> Candidate | None:
        """A feasible candidate near by; None where the first tries gave none."""
        for _ in range(6):
            plan = here.plan
            try:
                for _ in range(2):
                    kind = self._random.choice(NEIGHBOURHOODS)
                    moves = list(kind(places(plan, self.problem)))
                    if moves:
                        plan = self._random.choice(moves)()
            except ValueError:  # a replica without rows, or a degree without a profile
                continue
            found = judge.cost(plan)
            if found is not None:
                return found
        return None
