"""State of one `auto` search, from phase to phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from trainwright.search.auto.budget import MANY_STAGES_DEVICES, SMALL_CLUSTER_DEVICES
from trainwright.search.auto.computing import ComputeEstimate
from trainwright.search.auto.drafts import Draft
from trainwright.search.auto.local_search import CandidateEvaluator
from trainwright.search.problem import Candidate, Problem, SearchControl

EVALUATIONS = 2**27
"""Evaluation budget: `EVALUATIONS // devices ** 3`, not below `MIN_EVALUATIONS`, nor above `max_evaluations`."""
MIN_EVALUATIONS, MAX_EVALUATIONS, MAX_SMALL_CLUSTER_EVALUATIONS = 64, 750, 1500
"""Of 10 searches on 16 to 64 devices, eight had their best plan after 600 evaluations; the others gained 0.2 % later."""
USUAL_COMPUTE_ESTIMATE_RATIO = 2.5
"""Ratio of best seconds to the compute estimate above which subclusters are searched and the budget is extended."""
PHASE_STEPS = 100
"""Progress steps of each half of a search: drafts, then local search."""


def max_evaluations(devices: int) -> int:
    """Return the maximum number of evaluations at effort 1."""
    return MAX_SMALL_CLUSTER_EVALUATIONS if devices <= SMALL_CLUSTER_DEVICES else MAX_EVALUATIONS


@dataclass
class SearchState:
    """State shared by the phases of one search.

    Attributes:
        compute_estimate: iteration seconds if all devices computed all the time.
        provisional: first feasible plans, reported but not used as starting points.
        completed_steps: out of `2 * PHASE_STEPS`.
    """

    problem: Problem
    control: SearchControl
    evaluator: CandidateEvaluator
    compute_estimate: ComputeEstimate
    drafts: list[Draft] = field(default_factory=list)
    provisional: list[Candidate] = field(default_factory=list)
    completed_steps: int = 0

    @classmethod
    def of(cls, problem: Problem, control: SearchControl) -> SearchState:
        """Create the initial state."""
        devices = len(problem.devices)
        evaluations = min(max(EVALUATIONS // devices**3, MIN_EVALUATIONS), max_evaluations(devices))
        evaluator = CandidateEvaluator(problem, control, evaluations * control.effort)
        return cls(problem, control, evaluator, ComputeEstimate(problem))

    @property
    def feasible_candidates(self) -> list[Candidate]:
        return [*self.evaluator.feasible(), *self.provisional]

    @property
    def has_no_plan(self) -> bool:
        """Return whether no evaluated plan is feasible, provisional ones aside."""
        return not self.evaluator.feasible()

    @property
    def is_out_of_time(self) -> bool:
        """Return whether the deadline has passed and a feasible plan exists."""
        return self.control.expired() and bool(self.feasible_candidates)

    @property
    def best_seconds(self) -> float:
        """Return the best iteration seconds, or 0 without a feasible plan."""
        return min((candidate.estimate.iteration_seconds for candidate in self.feasible_candidates), default=0.0)

    @property
    def compute_estimate_ratio(self) -> float:
        """Return the best iteration seconds over the compute estimate, or 0 without a feasible plan."""
        alone = self.compute_estimate.cluster_seconds
        return self.best_seconds / alone if alone > 0 else 0.0

    @property
    def is_far_from_compute_estimate(self) -> bool:
        return self.compute_estimate_ratio > USUAL_COMPUTE_ESTIMATE_RATIO

    @property
    def is_small_cluster(self) -> bool:
        """Return whether the finest budget is affordable."""
        return len(self.problem.devices) <= SMALL_CLUSTER_DEVICES

    @cached_property
    def is_short_of_memory(self) -> bool:
        """Return whether the model's training state fills more than `MANY_STAGES_DEVICES` average devices."""
        problem = self.problem
        memory = [problem.cost_context.memory_of_node[device.node] for device in problem.devices]
        return problem.cost_context.model_state_bytes > MANY_STAGES_DEVICES * sum(memory) / len(memory)

    @contextmanager
    def with_extra_evaluations(self, max_evaluations: int) -> Iterator[None]:
        """Replace the remaining evaluations by `max_evaluations` inside the context, and restore them after."""
        remaining, self.evaluator.remaining_evaluations = self.evaluator.remaining_evaluations, float(max_evaluations)
        try:
            yield
        finally:
            self.evaluator.remaining_evaluations = remaining

    def report_progress(self, completed_steps: int, best_seconds: float | None = None) -> None:
        """Report progress with the best seconds so far, or `best_seconds` before any plan is feasible."""
        # Each draft generator counts from zero; reported progress must not go back.
        self.completed_steps = completed_steps = max(completed_steps, self.completed_steps)
        best = min(
            (candidate.estimate.iteration_seconds for candidate in self.feasible_candidates), default=best_seconds
        )
        self.control.report_progress(completed_steps, 2 * PHASE_STEPS, best)
