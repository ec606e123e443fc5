"""Succeeded: the winner, whole, with its speed-up over the baseline."""

from __future__ import annotations

from trainwright import documents
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import Winner
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials, Role
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.trials import TriedPlan


def answer_without_trials(book: Book, discovery: Discovery, planned: PlannedTrials) -> None:
    """The best prediction stands for the winner; no trial, so nothing that was measured."""
    best = planned.best
    book.fields["winner"] = _winner(best, discovery)
    for condition in (ConditionType.TRIALS_COMPLETED, ConditionType.SUCCEEDED):
        book.say(condition, "True", Reason.PLANNED_ONLY, best=best.predicted_seconds)


def answer(book: Book, discovery: Discovery, tried: tuple[TriedPlan, ...]) -> None:
    """The fastest measured plan, candidates and baselines alike."""
    measured = [(plan.seconds, plan.planned) for plan in tried if plan.seconds is not None]
    seconds, winner = min(measured, key=lambda pair: (pair[0], pair[1].overall_rank))
    baselines = [took for took, plan in measured if plan.role is Role.BASELINE or plan.counts_as_baseline]
    speedup = min(baselines) / seconds if baselines else None
    book.fields["winner"] = _winner(winner, discovery, seconds=seconds, trial=winner.name, speedup=speedup)
    book.say(
        ConditionType.SUCCEEDED,
        "True",
        Reason.BEST_TRIAL_SELECTED,
        trial=winner.name,
        seconds=seconds,
        speedup=f", {speedup:.2f} × as fast as the baseline" if speedup is not None else "",
        emulated=" (emulated devices)" if discovery.emulations() else "",
    )


def _winner(
    plan: PlannedTrial,
    discovery: Discovery,
    *,
    seconds: float | None = None,
    trial: str | None = None,
    speedup: float | None = None,
) -> Winner:
    return Winner(
        trial=trial,
        summary=plan.summary[:512],
        predicted_rank=plan.overall_rank,
        predicted_seconds=plan.predicted_seconds,
        measured_seconds=seconds,
        speedup_over_baseline=speedup,
        emulated=bool(discovery.emulations()),
        plan=documents.dump(plan.plan),
    )
