"""Preference: the trade for the first plan, the plan that runs now, and the change from it to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.quantity import format_bytes
from trainwright.report import units
from trainwright.report.remark import Remark
from trainwright.search import Candidate, Problem
from trainwright.search.preference.running_plan import PlanChange, RunningPlan


def preferred(candidates: Sequence[Candidate], problem: Problem) -> Remark:
    """Return what was traded for the first candidate, how the running plan does, and what changing to the first takes."""
    first, running = candidates[0], RunningPlan.of(problem)
    sentences = () if first.traded is None else (f"The first plan is preferred: it is {first.traded}.",)
    if running is None:
        return Remark(sentences)
    fields = {
        **({} if running.seconds is None else {"predicted_seconds": running.seconds}),
        "feasible": running.reason is None,
        "reason": running.reason,
    }
    return Remark((*sentences, _change_to(first, running, problem)), {"running_plan": fields})


def _change_to(first: Candidate, running: RunningPlan, problem: Problem) -> str:
    """Say how the running plan does, and what changing to the first candidate takes."""
    if problem.is_running(first.plan):
        return "It is the plan that runs now: nothing moves."
    change = PlanChange.of(running, first, problem)
    moves = "changing to the first moves no state"
    if change.moved_bytes:
        size = format_bytes(change.moved_bytes)
        moves = f"changing to the first moves {size} of state, which takes {units.seconds(change.seconds)}"
    if running.seconds is None or running.reason is not None:
        return f"The plan that runs now cannot stay: {running.reason}; {moves}."
    takes = f"The plan that runs now takes {units.seconds(running.seconds)} an iteration"
    return f"{takes}; {moves}{_pay_off(change, running, first)}."


def _pay_off(change: PlanChange, running: RunningPlan, first: Candidate) -> str:
    if running.plan.global_batch_size != first.plan.global_batch_size:
        return f" (its iteration has {running.plan.global_batch_size} rows, the first's {first.plan.global_batch_size})"
    if change.pays_off_after is None:
        return ", and no iteration gets shorter"
    if not change.moved_bytes:
        return ""
    return f" and pays off after {change.pays_off_after:,} iteration{'s' * (change.pays_off_after != 1)}"


def preference_fields(candidate: Candidate, running: RunningPlan | None, problem: Problem) -> dict[str, Any]:
    """Return a candidate's preference for JSON output: only what was requested and what happened."""
    traded = {} if candidate.traded is None else {"traded": candidate.traded}
    if running is None:
        return traded
    change = PlanChange.of(running, candidate, problem)
    pays_off = {} if change.pays_off_after is None else {"pays_off_after_iterations": change.pays_off_after}
    return {**traded, "moved_bytes": change.moved_bytes, "move_seconds": change.seconds, **pays_off}
