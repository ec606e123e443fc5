"""Our own search: unequal devices by design."""

from __future__ import annotations

from trainwright.search.auto.exhaustive import is_small
from trainwright.search.auto.phases.begin import begin
from trainwright.search.auto.phases.deepen import look_deeper
from trainwright.search.auto.phases.descend import descend_from_leaders
from trainwright.search.auto.phases.draft import draft_all, why_none_fits
from trainwright.search.auto.phases.enumerate import look_at_all
from trainwright.search.auto.phases.outdo import outdo_others
from trainwright.search.auto.phases.part import look_at_parts
from trainwright.search.auto.phases.seed import seed
from trainwright.search.auto.phases.vary import add_alternatives
from trainwright.search.auto.run import STEPS, Run
from trainwright.search.auto.variety import different
from trainwright.search.choice import check_profiled
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import in_order


def auto(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates of any shape that the plan document expresses, the best of each choice, best first by the exact replay.

    Devices are laid out in lines (`line`): kinds of nodes one after the other, in several orders, or evenly mixed, and
    with one node at both ends where first and last layer share a weight. On each line, and for each size of
    micro-batches, a dynamic programme (`programme`) cuts layers and devices into stages at once, each stage with the
    degrees, sharding and recompute that suit its devices (`stack`); rows follow the devices' speeds (`rows`). Kinds of
    nodes may make pipelines of their own instead (`several`), and where links are slow few nodes may do better than all
    (`parts`). Where devices are few, AMP's, Galvatron-BMW's and Alpa's answers join in. The best drafts are costed exactly,
    those that lack memory with more of it spared (`relief`), and descended from by small moves (`descent`, `moves`),
    behind which layers are dealt out anew (`dealing`); a walk goes on from what no move betters. Tiny problems are
    looked at whole first (`exhaustive`). Last, others of the best one's shape join in (`alternatives`).

    The same seed gives the same answer, but for a budget of time. Raises NoFeasiblePlan, with what comes closest, where
    nothing fits.
    """
    check_profiled(problem)
    run = Run.of(problem, control)
    if is_small(problem):
        look_at_all(run)
    else:
        begin(run)
        draft_all(run)
    for phase in (seed, look_deeper, look_at_parts, descend_from_leaders, outdo_others, add_alternatives):
        phase(run)
    if not run.found:
        raise why_none_fits(run)
    run.step(2 * STEPS)
    return different(in_order(run.found))[:top]
