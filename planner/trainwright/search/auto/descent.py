"""From a plan to a better one by small moves, each costed exactly."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from trainwright.plan import Plan, Sharding
from trainwright.search.auto.dealing import Dealing
from trainwright.search.auto.moves import NEIGHBOURHOODS, UNBALANCING, Neighbourhood, Place, places
from trainwright.search.auto.relief import relieved
from trainwright.search.auto.setups import sharded
from trainwright.search.auto.variety import leaders
from trainwright.search.distinct import Roles
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import fitting_candidate

_WHOLE, _LACKING = 1.0, 0.375
"""What costing a plan that fits, and one that does not, counts."""
LEAST_GAIN = 1e-6
"""Relative; moves that gain less are not gone on from."""
_LEAST_TRIES, _MOST_TRIES = 100, 150
"""Plans that are costed from a disturbed one, where so many are left."""
_SLACK = 0.02
"""Up to so much slower than the plan before may be what a walk goes on from, at its beginning."""
_ELSEWHERE = 4
"""Once in so many disturbances one of the best of different shapes is disturbed in place of the plan here."""
_ATTEMPTS = 6
"""At a disturbed plan that fits."""
_MOST_IN_VAIN = 200
"""Times in a row that nothing new was found to go on from: then there is little left to see."""


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
        self._dealing = Dealing(self.problem)
        self._dealt: set[Hashable] = set()

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
        return self._cost_relieved(self._roles.key(plan), plan)

    def cost_draft(self, plan: Plan) -> None:
        """The plan, relieved where memory is lacking, or sharded in all stages where that is not enough; each plan once."""
        key = self._roles.key(plan)
        if key not in self.known and self._cost_relieved(key, plan) is None:
            self.cost_relieved(sharded(plan, Sharding.ZERO3))

    def _cost_relieved(self, key: Hashable, plan: Plan) -> Candidate | None:
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

    def dealt(self, plan: Plan) -> Plan | None:
        """The plan with its layers dealt out anew; None where that was asked before."""
        key = self._roles.key(plan)
        if key in self._dealt:
            return None
        self._dealt.add(key)
        return self._dealing.dealt(plan)

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

    Kinds of moves take turns. A kind that helped is asked again at once; the descent ends when none helps. Behind a move that
    unbalances stages their layers are dealt out anew, and then left as they are.
    """
    here, last = start, max(judge.left - tries, 0)
    apart = places(here.plan, judge.problem)
    idle = 0
    number = 0
    while idle < len(NEIGHBOURHOODS) and judge.left > last and not judge.is_over:
        enough = here.estimate.iteration_seconds * (1 - LEAST_GAIN)
        better = _first_better(NEIGHBOURHOODS[number], apart, enough, judge, last)
        if better is None:
            number, idle = (number + 1) % len(NEIGHBOURHOODS), idle + 1
        else:
            here, idle = better, 0
            apart = places(here.plan, judge.problem)
    return here


def _first_better(
    kind: Neighbourhood, apart: Sequence[Place], enough: float, judge: Judge, last: float
) -> Candidate | None:
    """The first that takes less than enough seconds; plans are costed until the judge has no more than `last` left."""
    for move in kind(apart):
        try:
            moved = move()
        except ValueError:  # a replica would be left without rows
            continue
        for deals in (True, False) if kind in UNBALANCING else (False,):
            if judge.left <= last or judge.is_over:
                return None
            plan = judge.dealt(moved) if deals else moved
            found = None if plan is None else judge.cost_relieved(plan)
            if found is not None and found.estimate.iteration_seconds < enough:
                return found
    return None


@dataclass
class Walk:
    """Leads on from plans that no small move betters: disturbed, descended from again, gone on from where hardly slower."""

    judge: Judge
    seed: int

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - not for secrets

    def steps(self, start: Candidate) -> Iterator[None]:
        """One disturbance a step, until the judge is over or nothing new is found; it knows what was.

        What counts as hardly slower shrinks on the way.
        """
        judge, here, first, vain = self.judge, start, self.judge.left, 0
        while not judge.is_over and vain < _MOST_IN_VAIN:
            elsewhere = self._random.randrange(_ELSEWHERE) == 0
            disturbed = self._disturbed(self._random.choice(leaders(judge.feasible())) if elsewhere else here)
            vain = vain + 1 if disturbed is None else 0
            if disturbed is not None:
                found = descend(disturbed, judge, min(_MOST_TRIES, max(judge.left / 3, _LEAST_TRIES)))
                slack = _SLACK * judge.left / first * self._random.random()
                if found.estimate.iteration_seconds < here.estimate.iteration_seconds * (1 + slack):
                    here = found
            yield

    def _disturbed(self, here: Candidate) -> Candidate | None:
        """One or two moves away, whatever they cost; None where the first tries gave nothing that fits."""
        problem = self.judge.problem
        for _ in range(_ATTEMPTS):
            if self.judge.is_over:
                return None
            plan = here.plan
            try:
                for _ in range(self._random.randint(1, 2)):
                    moves = list(self._random.choice(NEIGHBOURHOODS)(places(plan, problem)))
                    if moves:
                        plan = self._random.choice(moves)()
            except ValueError:  # a replica without rows, or a degree without a profile
                continue
            found = self.judge.cost_relieved(plan)
            if found is not None:
                return found
        return None
