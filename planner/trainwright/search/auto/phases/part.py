"""Parts of the cluster, where all of it is slow."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.plan import Sharding
from trainwright.search.auto.drafts import Draft, Drafts
from trainwright.search.auto.efforts import FEW_DEVICES, LARGE_PART, PART
from trainwright.search.auto.parts import on_fewer_devices, on_fewer_nodes
from trainwright.search.auto.phases.draft import cost_drafts, draft
from trainwright.search.auto.run import Run
from trainwright.search.auto.setups import sharded
from trainwright.search.degrees import divisors
from trainwright.search.protocol import Problem

COSTED = 4
"""So many plans may be costed of every part with fewer devices a node, beside all others."""


def look_at_parts(run: Run) -> None:
    """With finer units than all of it has, where it is far from computing alone."""
    if run.has_few_devices or not run.is_slow:
        return
    before = len(run.drafts)
    for part in on_fewer_nodes(run.computing, run.best_seconds):
        if run.is_over:
            break
        _draft(run, part)
    for part in on_fewer_devices(run.computing, run.best_seconds):
        if run.is_over:
            break
        _cost_best(run, _draft(run, part))
    if len(run.drafts) > before:
        cost_drafts(run)


def _draft(run: Run, part: Problem) -> Sequence[Draft]:
    """The part's drafts, which the run's are from now on."""
    before = len(run.drafts)
    effort = PART if len(part.devices) <= FEW_DEVICES else LARGE_PART
    draft(run, Drafts(part, effort), divisors(run.problem.global_batch_size))
    return run.drafts[before:]


def _cost_best(run: Run, drafts: Sequence[Draft]) -> None:
    """A part's best draft, and that with gradients sharded."""
    if drafts:
        _, best = min(drafts, key=lambda one: one[0])
        with run.beside(COSTED):
            for plan in (best, sharded(best, Sharding.ZERO2)):
                run.judge.cost_draft(plan)
