"""More stages than coarse units have room for."""

from __future__ import annotations

from trainwright.search.auto.drafts import Drafts
from trainwright.search.auto.efforts import DEEP, MANY, MANY_DEVICES
from trainwright.search.auto.phases.draft import cost_drafts, draft
from trainwright.search.auto.run import Run
from trainwright.search.auto.variety import HARDLY_SLOWER, LEADERS, leaders
from trainwright.search.degrees import divisors


def look_deeper(run: Run) -> None:
    """Where one of the best has about as many stages as that, its size of micro-batches and smaller ones."""
    if run.is_deep or run.has_few_devices or run.has_none or run.is_over:
        return
    hardly_slower = run.best_seconds * HARDLY_SLOWER
    long = [
        one.plan.pipelines[0]
        for one in leaders(run.judge.feasible())[: LEADERS if len(run.problem.devices) <= MANY_DEVICES else 1]
        if one.estimate.iteration_seconds <= hardly_slower
        and len(one.plan.pipelines[0].stages) > MANY.coarse.units // 2
    ]
    if long:
        sizes = divisors(run.problem.global_batch_size)
        here = max(index for index, size in enumerate(sizes) if size <= long[0].micro_batch_size)
        draft(run, Drafts(run.problem, DEEP, joins_pipelines=False), sizes[max(here - 2, 0) : here + 1])
        cost_drafts(run)
