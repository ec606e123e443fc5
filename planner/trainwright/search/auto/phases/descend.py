"""Small moves from the best plans."""

from __future__ import annotations

from trainwright.search.auto.descent import Walk, descend
from trainwright.search.auto.exhaustive import is_small
from trainwright.search.auto.phases.vary import best_in_other_schedules
from trainwright.search.auto.run import MOST_REPLAYS, STEPS, USUAL_SLOWNESS, Run
from trainwright.search.auto.variety import leaders
from trainwright.search.ranking import in_order

FIRST_SHARE = 1 / 12
"""Of the plans that are costed near each leader before the best of them are gone on from."""


def descend_from_leaders(run: Run) -> None:
    """From the leaders to what no small move betters; what is left is spent on a walk from the best.

    From each a few steps first, so that it is known by what becomes of it.
    """
    _grant_more(run)
    for plan in best_in_other_schedules(run):
        run.judge.cost(plan)
    judge, first = run.judge, max(run.judge.left, 1.0)
    for leader in leaders(judge.feasible()):
        descend(leader, judge, first * FIRST_SHARE)
        _step_down(run, first)
    for leader in leaders(judge.feasible()):
        if judge.is_over:
            return
        descend(leader, judge, judge.left / 2)
        _step_down(run, first)
    if not run.has_none:
        for _ in Walk(judge, run.control.seed).steps(in_order(judge.feasible())[0]):
            _step_down(run, first)


def _grant_more(run: Run) -> None:
    """More plans, up to what small problems have, where the best takes much longer than computing alone."""
    if run.is_slow and not is_small(run.problem):
        granted = min(run.judge.left * run.slowness / USUAL_SLOWNESS, MOST_REPLAYS * run.control.effort)
        run.judge.left = max(run.judge.left, granted)


def _step_down(run: Run, first: float) -> None:
    """Progress by what is left of so much."""
    run.step(STEPS + int(STEPS * (1 - max(run.judge.left, 0.0) / first)))
