"""What is known from elsewhere."""

from __future__ import annotations

from trainwright.search.auto.phases.draft import most_drafts
from trainwright.search.auto.run import Run
from trainwright.search.auto.seeds import seeds
from trainwright.search.preference.adaption import adapted


def seed(run: Run) -> None:
    """What other searches find, and what can be made of the plan that runs now."""
    if run.problem.preference.keep is not None:
        for plan in adapted(run.problem.preference.keep, run.problem)[: most_drafts(run)]:
            run.judge.cost_relieved(plan)
    for candidate in seeds(run.problem, run.control, is_deep=run.is_deep, is_over=lambda: run.is_over):
        run.judge.add(candidate)
