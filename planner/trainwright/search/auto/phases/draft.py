"""What the programme makes of lines of devices, and the best of that costed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.plan import Plan
from trainwright.search.auto.drafts import Drafts
from trainwright.search.auto.efforts import DEEP, FEW, LARGE, MANY, MANY_DEVICES, Effort
from trainwright.search.auto.run import STEPS, Run
from trainwright.search.choice import Drafting, why_nothing_fits
from trainwright.search.degrees import divisors
from trainwright.search.protocol import NoFeasiblePlan

DRAFTS = 48
"""Plans of the programme that are costed exactly; what does not fit, which is sooner known, counts in part."""
LEAST_DRAFTS = 4
"""So many are costed though the time is over: without them all that was looked at till then were in vain."""


def draft_all(run: Run) -> None:
    """With the efforts that suit the number of devices, and all sizes of micro-batches."""
    for effort in _efforts(run):
        draft(run, Drafts(run.problem, effort), divisors(run.problem.global_batch_size))
        cost_drafts(run)


def draft(run: Run, drafts: Drafts, sizes: Sequence[int]) -> None:
    """Until all is looked at, or the time is over."""
    for found, share in drafts.steps(sizes):
        if found and run.has_none:
            run.judge.cost(found[0][1])
        run.drafts += found
        run.step(int(STEPS * share / 2))
        if run.is_over:
            break


def cost_drafts(run: Run) -> None:
    """The best drafts, those of every number of stages and of every size of micro-batches first."""
    drafts = _best_first(run)
    first: dict[object, Plan] = {}
    for plan in drafts:
        first.setdefault(tuple(len(pipeline.stages) for pipeline in plan.pipelines), plan)
        first.setdefault(plan.pipelines[0].micro_batch_size, plan)
    most = most_drafts(run)
    for plans, count in ((first.values(), most // 2), (drafts, most)):
        # Lines that differ often have the same draft, which is costed, and counted, once.
        last = run.judge.left - count
        for number, plan in enumerate(plans):
            if run.judge.left <= last or (run.is_over and number >= LEAST_DRAFTS):
                break
            # What the programme takes to be recomputed, and sharded, may not be enough.
            run.judge.cost_draft(plan)


def most_drafts(run: Run) -> int:
    """How many plans of one origin may be costed."""
    return min(DRAFTS, int(run.judge.left / 5))


def why_none_fits(run: Run) -> NoFeasiblePlan:
    """With the draft that comes closest to fitting, where there is one; else with AMP's plan that does."""
    return why_nothing_fits(run.problem, _best_first(run)[:DRAFTS] or Drafting.of(run.problem).unlimited_plans())


def _best_first(run: Run) -> list[Plan]:
    return [plan for _, plan in sorted(run.drafts, key=lambda one: one[0])]


def _efforts(run: Run) -> Iterator[Effort]:
    if run.has_few_devices:
        yield FEW
    elif run.is_deep:
        yield DEEP
    else:
        yield MANY if len(run.problem.devices) <= MANY_DEVICES else LARGE
        if run.has_none:
            yield DEEP
