"""End of an iteration on every stage: gradients reduced, weights updated and sharded weights gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.cost.gradient_sync import GradientReduction
from trainwright.cost.messages import run_messages
from trainwright.cost.network import Nic
from trainwright.cost.operators.stage_costs import operator_stage_costs
from trainwright.cost.plan_layout import StageKey
from trainwright.cost.stage_times import PlanTimes
from trainwright.cost.time_terms import overlapped_seconds, update_seconds
from trainwright.strategy import Sharding


@dataclass(frozen=True, slots=True)
class StageEnd:
    """End of a stage's last backward, over all its workers.

    Attributes:
        seconds: when the last worker ends.
        last_backward_start: when the last worker starts its last backward.
        overlapped_reductions_end: when reductions that overlap it end, if nothing else uses the network.
    """

    seconds: float
    last_backward_start: float = 0.0
    overlapped_reductions_end: float = 0.0


def reduction_ends(reductions: Sequence[GradientReduction], ends: Mapping[StageKey, StageEnd]) -> tuple[float, ...]:
    """Return when each reduction ends.

    Reductions at the same depth of the predecessor graph share NICs evenly: on a NIC, another reduction delays one by at most
    the work that the delayed one has there itself, and no delay outlasts the NIC's total work. Reductions that overlap the
    last backward occupy NICs from its start.
    """
    depth: list[int] = []
    for sync in reductions:
        depth.append(1 + max((depth[number] for number in sync.predecessors), default=-1))
    reduction_end = [0.0] * len(reductions)
    for level in range(max(depth, default=-1) + 1):
        chosen = {}
        for number, sync in enumerate(reductions):
            if depth[number] == level:
                owners = [ends[key] for key in sync.stages]
                start = max(owner.last_backward_start if sync.overlaps_backward else owner.seconds for owner in owners)
                start = max(start, *(reduction_end[before] for before in sync.predecessors), 0.0)
                alone = (
                    max(owner.overlapped_reductions_end for owner in owners)
                    if sync.overlaps_backward
                    else start + sync.seconds
                )
                chosen[number] = start, alone, sync
        for number, end in _together(chosen).items():
            reduction_end[number] = end
    return tuple(reduction_end)


def _together(chosen: Mapping[int, tuple[float, float, GradientReduction]]) -> dict[int, float]:
    """Return the ends of reductions that may share NICs, given (start, end without sharing, reduction) by number."""
    on_card: dict[Nic, list[tuple[float, float]]] = {}
    for start, _, sync in chosen.values():
        for card, work in sync.nic_seconds.items():
            on_card.setdefault(card, []).append((start, work))
    all_through = {card: _all_through(arrivals) for card, arrivals in on_card.items()}
    end_of = {}
    for number, (start, end, sync) in chosen.items():
        for card, work in sync.nic_seconds.items():
            if len(on_card[card]) > 1:
                shared = start + sum(min(work, other) for _, other in on_card[card])
                end = max(end, min(shared, all_through[card]) + sync.latency_seconds)  # noqa: PLW2901 - the latest
        end_of[number] = end
    return end_of


def _all_through(arrivals: Sequence[tuple[float, float]]) -> float:
    """Return when a NIC has done all work, given (start, seconds of work) of each arrival."""
    end = 0.0
    for start, work in sorted(arrivals):
        end = max(end, start) + work
    return end


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Optimizer step of a stage after its last backward.

    Attributes:
        gradients_end: when its gradients are reduced over replicas and pipelines; 0 if nothing is reduced.
        tied_gradients_end: when the gradients of tied weights with other owners are reduced.
        all_gather_seconds: all-gathers of the updated weights (zero1, zero2).
    """

    gradients_end: float
    tied_gradients_end: float
    all_gather_seconds: float


def optimizer_steps(
    plan_times: PlanTimes, reductions: Sequence[GradientReduction], ends: Mapping[StageKey, StageEnd]
) -> dict[StageKey, OptimizerStep]:
    """Return the optimizer step of each stage."""
    done = reduction_ends(reductions, ends)
    gradients: dict[StageKey, float] = {}
    shared: dict[StageKey, float] = {}
    for sync, end in zip(reductions, done, strict=True):
        into = shared if sync.is_tied_weight else gradients
        for key in sync.stages:
            into[key] = max(into.get(key, 0.0), end)
    return {
        key: OptimizerStep(gradients.get(key, 0.0), shared.get(key, 0.0), _all_gather_seconds(plan_times, key))
        for key in plan_times.stages
    }


def _all_gather_seconds(plan_times: PlanTimes, key: StageKey) -> float:
    """Return the seconds of all-gathering the weights that zero1 and zero2 update in shards, unless forwards gather them.

    A runtime may gather them while the next iteration's first forward computes; not those of shardings of operators.
    """
    stage, context, total = plan_times.stages[key], plan_times.context, 0.0
    if stage.stage.operators is not None:
        return operator_stage_costs(stage.stage, context).publish_seconds
    for run, layout, values in zip(stage.stage.layers, stage.layouts, plan_times.resident[key].by_run, strict=True):
        updates_shards = run.strategy.sharding in {Sharding.ZERO1, Sharding.ZERO2} and run.strategy.data > 1
        if updates_shards and not plan_times.gathers_for_passes(run):
            collective = context.collectives.all_reduce(layout.data_groups)
            num_bytes = values * context.model.dtype.num_bytes
            total += collective.all_gather_seconds(num_bytes, run_messages(run, num_bytes, context))
    hidden = 0.0
    if context.runtime.overlaps_weight_gathers:
        hidden = min(total, *(worker.forward.compute_seconds for worker in stage.workers))
    return overlapped_seconds(total, hidden, context.runtime.overlap_slowdown_ratio)


def stage_update_seconds(plan_times: PlanTimes, key: StageKey, accelerator: str) -> float:
    """Return the optimizer seconds of one rank of a stage; replicas divide sharded parameters.

    A tied weight is updated once, with the first run that owns it, or unsharded.
    """
    stage = plan_times.stages[key].stage
    if stage.operators is not None:
        return operator_stage_costs(stage, plan_times.context).update_seconds
    resident, total, slowest = plan_times.resident[key], 0.0, 0.0
    for run, values in zip(stage.layers, resident.by_run, strict=True):
        seconds, counted = update_seconds(accelerator, run, plan_times.context)
        each = seconds / counted if counted else 0.0
        total += (values * each if counted else seconds) / (
            1 if run.strategy.sharding is Sharding.NONE else run.strategy.data
        )
        slowest = max(slowest, each)
    return total + resident.unsharded * slowest
