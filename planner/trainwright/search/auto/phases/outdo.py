"""Another search's plan that is better than all: it is gone on from, so that none of theirs is better in the end."""

from __future__ import annotations

from trainwright.search.auto.descent import descend
from trainwright.search.auto.run import Run
from trainwright.search.auto.seeds import last_seeds

_MOST_REPLAYS = 300
"""Plans that are costed near it, at effort 1."""


def outdo_others(run: Run) -> None:
    """Ask who was not asked yet, and descend from what is better than everything that was found."""
    for candidate in last_seeds(run.problem, run.control, lambda: run.is_over):
        if run.has_none or candidate.estimate.iteration_seconds < run.best_seconds:
            run.judge.add(candidate)
            most = int(_MOST_REPLAYS * run.control.effort)
            with run.beside(most):
                descend(candidate, run.judge, most)
