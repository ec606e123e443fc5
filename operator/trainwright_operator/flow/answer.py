"""Succeeded: the winner, whole, with its speed-up over the baseline and what it costs."""

from __future__ import annotations

from trainwright import documents
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import Objective
from trainwright_operator.api.status import Winner
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials, Role
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.prices import price_per_sample
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.trial_status import TriedPlan


def answer_without_trials(book: Book, discovery: Discovery, planned: PlannedTrials) -> None:
    """The planner's first candidate stands for the winner; no trial, so nothing that was measured."""
    best = planned.best
    book.fields["winner"] = _winner(book, discovery, best)
    for condition in (ConditionType.TRIALS_COMPLETED, ConditionType.SUCCEEDED):
        book.say(condition, "True", Reason.PLANNED_ONLY, best=best.predicted_seconds)


def answer(book: Book, discovery: Discovery, tried: tuple[TriedPlan, ...]) -> None:
    """The fastest measured plan (the cheapest where that is the objective), candidates and baselines alike."""
    measured = [(plan.seconds, plan.planned) for plan in tried if plan.seconds is not None]
    is_cost = book.spec.search.objective is Objective.COST

    def worth(pair: tuple[float, PlannedTrial]) -> tuple[float, int]:
        seconds, plan = pair
        price = _price(book, discovery, plan, seconds) if is_cost else None
        return (seconds if price is None else price), plan.overall_rank

    seconds, winner = min(measured, key=worth)
    baselines = [took for took, plan in measured if plan.role is Role.BASELINE or plan.counts_as_baseline]
    speedup = min(baselines) / seconds if baselines else None
    price = _price(book, discovery, winner, seconds)
    book.fields["winner"] = _winner(book, discovery, winner, seconds=seconds, speedup=speedup)
    book.say(
        ConditionType.SUCCEEDED,
        "True",
        Reason.BEST_TRIAL_SELECTED,
        trial=winner.name,
        seconds=seconds,
        price=f", {price:.4g} a sample" if price is not None else "",
        speedup=f", {speedup:.2f} × as fast as the baseline" if speedup is not None else "",
        emulated=" (emulated devices)" if discovery.emulations() else "",
    )


def _price(book: Book, discovery: Discovery, plan: PlannedTrial, seconds: float) -> float | None:
    return price_per_sample(plan.plan, seconds, discovery, book.spec.devices)


def _winner(
    book: Book,
    discovery: Discovery,
    plan: PlannedTrial,
    *,
    seconds: float | None = None,
    speedup: float | None = None,
) -> Winner:
    return Winner(
        trial=plan.name if seconds is not None else None,
        summary=plan.summary[:512],
        predicted_rank=plan.overall_rank,
        predicted_seconds=plan.predicted_seconds,
        measured_seconds=seconds,
        speedup_over_baseline=speedup,
        price_per_sample=_price(book, discovery, plan, plan.predicted_seconds if seconds is None else seconds),
        emulated=bool(discovery.emulations()),
        plan=documents.dump(plan.plan),
    )
