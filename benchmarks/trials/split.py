"""Split of a measured iteration on one device into computation, communication and bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.cost.estimate import Breakdown
from trainwright.plan import Plan, Stage
from trainwright.timeline import Action, Moment, RankTimeline, Timeline

_MICROSECONDS = 1e6
_COMMUNICATION = frozenset({Action.TENSOR_SUM, Action.GATHER, Action.MOVE, Action.GRADIENTS})
_PASSES = frozenset({Action.FORWARD, Action.BACKWARD})


@dataclass(frozen=True)
class Split:
    """Seconds of one device's iteration."""

    compute: float
    communication: float
    bubble: float


def predicted_split(parts: Breakdown) -> Split:
    """Return the predicted split of the critical device."""
    talk = parts.tensor_sync_seconds + parts.sharding_seconds + parts.redistribution_seconds
    talk += parts.point_to_point_seconds + parts.gradient_sync_seconds + parts.shared_weight_sync_seconds
    compute = parts.compute_seconds + parts.update_seconds + parts.constant_seconds
    return Split(compute, talk, parts.bubble_seconds)


def measured_split(timeline: Timeline, plan: Plan, device: Device) -> Split | None:
    """Return the device's split by its timeline; None if the timeline is incomplete.

    A wait for a message is a bubble until its sender's pass has ended, and communication from there.
    """
    ranks = {Device(rank.node, rank.slot): rank for rank in timeline.ranks}
    if any(rank.omitted for rank in timeline.ranks):
        return None
    before, behind = _neighbours(plan, device)
    forward_ends, backward_ends = _ends(ranks, before, Action.FORWARD), _ends(ranks, behind, Action.BACKWARD)
    moments = ranks[device].moments
    compute = talk = bubble = 0.0
    for place, moment in enumerate(moments):
        length = moment.length_microseconds
        if moment.action in _PASSES or moment.action is Action.UPDATE:
            compute += length
        elif moment.action in _COMMUNICATION:
            talk += length
            compute -= length if _is_inside(moment, moments) else 0
        elif moment.action is Action.WAIT:
            following = next((one.action for one in moments[place + 1 :] if one.action in _PASSES), None)
            ends = forward_ends if following is Action.FORWARD else backward_ends
            sent = min(max(ends.get(moment.number, moment.start_microseconds), moment.start_microseconds), moment.end_microseconds)  # fmt: skip
            bubble += sent - moment.start_microseconds
            talk += moment.end_microseconds - sent
    return Split(compute / _MICROSECONDS, talk / _MICROSECONDS, bubble / _MICROSECONDS)


def _neighbours(plan: Plan, device: Device) -> tuple[Sequence[Device], Sequence[Device]]:
    for pipeline in plan.pipelines:
        stages: tuple[Stage, ...] = pipeline.stages
        for place, stage in enumerate(stages):
            if device in stage.devices:
                before = stages[place - 1].devices if place else ()
                behind = stages[place + 1].devices if place + 1 < len(stages) else ()
                return before, behind
    raise ValueError(f"device {device} is not in the plan")


def _ends(ranks: dict[Device, RankTimeline], devices: Sequence[Device], action: Action) -> dict[int, int]:
    """Return, by micro-batch, the microsecond when the last of these devices ended that pass."""
    found: dict[int, int] = {}
    for device in devices:
        for moment in ranks[device].moments:
            if moment.action is action:
                found[moment.number] = max(found.get(moment.number, 0), moment.end_microseconds)
    return found


def _is_inside(moment: Moment, moments: Sequence[Moment]) -> bool:
    """Return whether it lies within a pass: ZeRO also gathers weights after the update, and gradients are reduced after passes."""
    return any(
        one.action in _PASSES
        and one.start_microseconds <= moment.start_microseconds
        and moment.end_microseconds <= one.end_microseconds
        for one in moments
    )
