"""Tiny problems are looked at whole."""

from __future__ import annotations

from trainwright.search.auto.exhaustive import exhaustive
from trainwright.search.auto.run import Run
from trainwright.search.protocol import NoFeasiblePlan

BEST, COSTED, REPLAYS = 8, 2000, 200
"""How many of the best plans are kept, how many are costed for that, at most, and plans that are costed near them."""


def look_at_all(run: Run) -> None:
    """Every plan whose stages have one degree each; those that mix degrees inside a stage are found by the descent."""
    run.judge.left = REPLAYS * run.control.effort
    try:
        for candidate in exhaustive(run.problem, run.control, BEST, most_costed=COSTED * run.control.effort):
            run.judge.add(candidate)
    except NoFeasiblePlan:
        run.judge.left = 0
