"""The plan that runs now on the present cluster, and when a change to another pays off."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.plan import Plan
from trainwright.search.candidates import candidate_of
from trainwright.search.preference.state_migration import migration_bytes, migration_seconds
from trainwright.search.problem import Candidate, Problem


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """The plan that runs now, as it is on the present cluster.

    Attributes:
        seconds: predicted seconds of its iteration; None where it cannot run on the cluster at all.
        reason: why it cannot run, or does not fit into memory; None if it still does.
    """

    plan: Plan
    seconds: float | None = None
    reason: str | None = None

    @classmethod
    def of(cls, problem: Problem) -> RunningPlan | None:
        """Return the problem's plan to keep; None if it keeps none."""
        plan = problem.running_plan
        if plan is None:
            return None
        for devices, what in ((problem.cluster.devices, "gone"), (problem.devices, "excluded")):
            plan_devices = set(devices)
            missing = [device for device in plan.devices if device not in plan_devices]
            if missing:
                are = f"{'is' if len(missing) == 1 else 'are'} {what}"
                return cls(
                    plan, None, f"{len(missing)} of its {len(plan.devices)} devices {are} (the first is {missing[0]})"
                )
        try:
            estimate = candidate_of(problem, plan).estimate
        except ValueError as error:
            return cls(plan, None, str(error))
        if estimate.reason is not None:
            kept = problem.limits.headroom_words
            return cls(plan, estimate.iteration_seconds, f"it does not fit into memory{kept}: {estimate.reason}")
        return cls(plan, estimate.iteration_seconds)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Change from the running plan to a candidate.

    Attributes:
        moved_bytes, seconds: state that devices must fetch, and how long that takes.
        pays_off_after: iterations after which the time of the move is made up; None where no iteration gets shorter, where
            the running plan cannot run, and for plans of different batches.
    """

    moved_bytes: int
    seconds: float
    pays_off_after: int | None

    @classmethod
    def of(cls, running: RunningPlan, candidate: Candidate, problem: Problem) -> PlanChange:
        """Return what changing to the candidate takes. Raises ValueError if the plans are for different models."""
        old, new = running.plan, candidate.plan
        seconds = migration_seconds(old, new, problem.cost_context)
        gain = 0.0
        if running.seconds is not None and old.global_batch_size == new.global_batch_size:
            gain = running.seconds - candidate.estimate.iteration_seconds
        return cls(
            migration_bytes(old, new, problem.cost_context), seconds, math.ceil(seconds / gain) if gain > 0 else None
        )
