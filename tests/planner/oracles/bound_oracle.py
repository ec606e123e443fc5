"""Lower bound of a plan's iteration time from its stage and message times."""

from __future__ import annotations

from trainwright.cost.context import CostContext
from trainwright.cost.estimate import check_plan
from trainwright.cost.pipeline_replay import PipelineChannels, channels_of
from trainwright.cost.schedule_replay import FORWARD
from trainwright.cost.stage_times import PlanTimes
from trainwright.plan import Plan


def lower_bound_seconds(plan: Plan, setting: CostContext) -> float:
    """Return max_i (m · t_i + Σ_{j<i} (t_j + e_fwd,j + e_bwd,j)) of the longest pipeline; never above the estimate.

    A worker of stage i computes m micro-batches in sequence (t_i: a forward and a backward). Before its first one a
    micro-batch passes all earlier stages, and after its last one a gradient passes them back; the fastest worker and
    the fastest message of each count. Unless transfers are hidden, t_i includes the messages with both neighbours, but
    for the first activation and the last gradient of the boundary above.
    """
    check_plan(plan, setting)
    paces = PlanTimes(plan, setting)
    bounds = (
        _bound(channels_of(index, paces), pipeline.micro_batches, setting.runtime.hides_transfers)
        for index, pipeline in enumerate(plan.pipelines)
    )
    return max(bounds) + setting.runtime.constant_seconds


def _bound(found: PipelineChannels, micro_batches: int, hides_transfers: bool) -> float:
    stages = len(found.first_worker_of_stage) - 1
    boundaries = [[float("inf"), float("inf")] for _ in range(stages - 1)]
    for channel in found.channels:
        upper = found.durations[channel.sender if channel.direction == FORWARD else channel.receiver].stage
        seconds = channel.send_seconds + channel.latency_seconds
        boundaries[upper][channel.direction] = min(boundaries[upper][channel.direction], seconds)
    best = above = 0.0
    for stage in range(stages):
        works = found.durations[found.first_worker_of_stage[stage] : found.first_worker_of_stage[stage + 1]]
        both = [work.forward_seconds + work.backward_seconds for work in works]
        longer_at_the_end = [work.last_backward_seconds - work.backward_seconds for work in works]
        busy = (micro_batches * one + last for one, last in zip(both, longer_at_the_end, strict=True))
        blocked = 0.0
        if not hides_transfers:
            blocked += micro_batches * sum(boundaries[stage]) if stage < stages - 1 else 0.0
            blocked += (micro_batches - 1) * sum(boundaries[stage - 1]) if stage else 0.0
        best = max(best, above + max(busy) + blocked)
        if stage < stages - 1:
            above += min(work.forward_seconds for work in works) + min(work.last_backward_seconds for work in works)
            above += sum(boundaries[stage])
    return best
