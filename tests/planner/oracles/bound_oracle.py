"""What no iteration of a plan can beat, by the times of its stages and messages alone."""

from __future__ import annotations

from trainwright.cost.checks import check_plan
from trainwright.cost.pace import Paces
from trainwright.cost.pipelines import Flow, flow
from trainwright.cost.schedule import FORWARD
from trainwright.cost.setting import Setting
from trainwright.plan import Plan


def lower_bound_seconds(plan: Plan, setting: Setting) -> float:
    """max_i (m · t_i + Σ_{j<i} (t_j + e_fwd,j + e_bwd,j)), of the longest pipeline; never above the estimate.

    A worker of stage i computes m micro-batches one after the other (t_i: a forward and a backward). Before its first
    one a micro-batch has to come through all stages above, and behind its last one a gradient has to go back through
    them; of these stages and boundaries the fastest worker and the fastest message count.
    """
    check_plan(plan, setting)
    paces = Paces(plan, setting)
    bounds = (_bound(flow(index, paces), pipeline.micro_batches) for index, pipeline in enumerate(plan.pipelines))
    return max(bounds) + setting.runtime.constant_seconds


def _bound(found: Flow, micro_batches: int) -> float:
    stages = len(found.firsts) - 1
    boundaries = [[float("inf"), float("inf")] for _ in range(stages - 1)]
    for channel in found.channels:
        upper = found.works[channel.sender if channel.direction == FORWARD else channel.receiver].stage
        seconds = channel.drain_seconds + channel.latency_seconds
        boundaries[upper][channel.direction] = min(boundaries[upper][channel.direction], seconds)
    best = above = 0.0
    for stage in range(stages):
        works = found.works[found.firsts[stage] : found.firsts[stage + 1]]
        both = [work.forward_seconds + work.backward_seconds for work in works]
        longer_at_the_end = [work.last_backward_seconds - work.backward_seconds for work in works]
        busy = (micro_batches * one + last for one, last in zip(both, longer_at_the_end, strict=True))
        best = max(best, above + max(busy))
        if stage < stages - 1:
            above += min(work.forward_seconds for work in works) + min(work.last_backward_seconds for work in works)
            above += sum(boundaries[stage])
    return best
