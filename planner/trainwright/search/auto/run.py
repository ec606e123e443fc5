"""What a run of `auto` knows, from phase to phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from trainwright.cost.memory import parameter_bytes
from trainwright.search.auto.computing import Computing
from trainwright.search.auto.descent import Judge
from trainwright.search.auto.drafts import Draft
from trainwright.search.auto.efforts import DEEP_STAGES, FEW_DEVICES
from trainwright.search.protocol import Candidate, Control, Problem

REPLAYED_DEVICES = 2**27
"""So many by the cube of the devices are the plans that are costed, at least LEAST_REPLAYS and at most MOST_REPLAYS."""
LEAST_REPLAYS, MOST_REPLAYS = 64, 1500
USUAL_SLOWNESS = 2.5
"""Where the best takes more times as long as computing alone, parts of the cluster are looked at, and more plans costed."""
STEPS = 100
"""What progress is counted in: so many are the drafts, of which the first take half, as many the descent."""


@dataclass
class Run:
    """What was asked, what was found, and how far the run is.

    Attributes:
        judge: costs plans, and keeps them.
        computing: how long devices compute, with nothing to wait for.
        drafts: seconds as the programme predicts them, and plans.
        early: answers of the beginning that no phase goes on from.
        done: of 2 × STEPS.
    """

    problem: Problem
    control: Control
    judge: Judge
    computing: Computing
    drafts: list[Draft] = field(default_factory=list)
    early: list[Candidate] = field(default_factory=list)
    done: int = 0

    @classmethod
    def of(cls, problem: Problem, control: Control) -> Run:
        """At its beginning."""
        replays = min(max(REPLAYED_DEVICES // len(problem.devices) ** 3, LEAST_REPLAYS), MOST_REPLAYS)
        return cls(problem, control, Judge(problem, control, replays * control.effort), Computing(problem))

    @property
    def found(self) -> list[Candidate]:
        """All feasible plans."""
        return [*self.judge.feasible(), *self.early]

    @property
    def has_none(self) -> bool:
        """Whether there is no plan to go on from."""
        return not self.judge.feasible()

    @property
    def is_over(self) -> bool:
        """Whether the time is, and there is an answer."""
        return self.control.expired() and bool(self.found)

    @property
    def best_seconds(self) -> float:
        """0 where there is none."""
        return min((one.estimate.iteration_seconds for one in self.found), default=0.0)

    @property
    def slowness(self) -> float:
        """How many times as long as computing alone the best takes; 0 where there is none."""
        alone = self.computing.all_seconds
        return self.best_seconds / alone if alone > 0 else 0.0

    @property
    def is_slow(self) -> bool:
        """Whether there is a plan, and the best takes much longer than computing alone."""
        return self.slowness > USUAL_SLOWNESS

    @property
    def has_few_devices(self) -> bool:
        """Whether the first effort looks finely enough."""
        return len(self.problem.devices) <= FEW_DEVICES

    @cached_property
    def is_deep(self) -> bool:
        """Whether memory is short."""
        problem = self.problem
        needed = problem.model.parameters * parameter_bytes(
            problem.model, problem.optimizer, problem.runtime.gradient_dtype
        )
        memory = [problem.setting.memory_of_node[device.node] for device in problem.devices]
        return needed > DEEP_STAGES * sum(memory) / len(memory)

    @contextmanager
    def beside(self, most: int) -> Iterator[None]:
        """In here so many plans may be costed, beside all others."""
        left, self.judge.left = self.judge.left, float(most)
        try:
            yield
        finally:
            self.judge.left = left

    def step(self, done: int, best_seconds: float | None = None) -> None:
        """Tell whoever watches how far it is, with the best so far or, where that is still being made, so many seconds."""
        # What is looked at in turn each begins anew; what is told does not.
        self.done = done = max(done, self.done)
        known = min((one.estimate.iteration_seconds for one in self.found), default=best_seconds)
        self.control.step(done, 2 * STEPS, known)
