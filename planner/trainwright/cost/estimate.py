"""Estimate of a plan: exact replay of one iteration, and the peak memory of every device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.cluster import Cluster, Device
from trainwright.cost.context import CostContext
from trainwright.cost.gradient_sync import gradient_reductions
from trainwright.cost.memory import MemoryParts, stage_memory
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.cost.operators.stage_costs import operator_stage_costs
from trainwright.cost.optimizer_step import OptimizerStep, StageEnd, optimizer_steps, stage_update_seconds
from trainwright.cost.pipeline_replay import StageReplayTimes, replay_pipelines
from trainwright.cost.plan_layout import StageKey
from trainwright.cost.stage_times import PlanTimes, StageTimes
from trainwright.model import Model, least_rows, least_rows_words
from trainwright.outside.notebook import ShownInNotebooks
from trainwright.plan import Plan, Stage, unequal_operators
from trainwright.profiles import Profiles
from trainwright.quantity import format_bytes
from trainwright.runtime import Runtime
from trainwright.strategy import Strategy
from trainwright.training import Optimizer


def check_plan(plan: Plan, context: CostContext) -> None:
    """Raise ValueError if the plan does not match the model or the cluster."""
    model = context.model
    if plan.model_layers != len(model.layers):
        raise ValueError(f"the plan is for a model of {plan.model_layers} layers, but this one has {len(model.layers)}")
    _check_devices(plan, context)
    several = len(plan.pipelines) > 1
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            for run in stage.layers:
                if degree := run.strategy.indivisible_degree(model.max_tensor_degree):
                    raise ValueError(
                        f"{f'pipeline {index}, ' if several else ''}stage {number}, layers {run.first}…"
                        f"{run.end - 1}: {degree} does not divide the model, which "
                        f"allows {model.max_tensor_degree}"
                    )
            if stage.operators is not None:
                _check_operators(plan, stage, f"stage {number}", context)


def _check_operators(plan: Plan, stage: Stage, where: str, context: CostContext) -> None:
    """Raise ValueError for shardings of operators that have no cost: of other layers, or with what is costed by degrees alone."""
    if (problem := unequal_operators(plan)) is not None:
        raise ValueError(f"{where}: {problem}")
    for run in stage.layers:
        own = run.strategy
        if own != Strategy(*own.degrees, own.order, own.sharding, own.recompute):
            raise ValueError(
                f"{where}, layers {run.first}…{run.end - 1}: sequence parallelism and weights that stay gathered are of degrees; "
                "remove them, or the shardings of operators"
            )
    operator_stage_costs(stage, context)


def _check_devices(plan: Plan, context: CostContext) -> None:
    largest: dict[str, int] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for device in stage.devices:
                if not 0 <= device.slot <= largest.get(device.node, -1):
                    context.cluster.accelerator_of(device)
                    largest[device.node] = device.slot


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Iteration seconds of the critical device, which ends last, by cause; the parts add up to the iteration.

    Attributes:
        compute_seconds: forwards and backwards.
        tensor_sync_seconds: tensor all-reduces of forwards and backwards.
        sharding_seconds: all-gathers of sharded weights that computation does not hide.
        redistribution_seconds: moving rows between layer runs of a stage with different rank layouts.
        point_to_point_seconds: waiting while a message from a neighbouring stage is in transit, and gathering its slices.
        bubble_seconds: waiting before that message is sent.
        gradient_sync_seconds: increase of the last backward by gradient reductions, and time from its end until they end,
            including the wait for slower replicas.
        shared_weight_sync_seconds: time from there until the gradients of tied weights are reduced, including the wait for
            their other owners.
        constant_seconds: the runtime's constant time per iteration.
    """

    compute_seconds: float
    tensor_sync_seconds: float
    sharding_seconds: float
    redistribution_seconds: float
    point_to_point_seconds: float
    bubble_seconds: float
    gradient_sync_seconds: float
    shared_weight_sync_seconds: float
    update_seconds: float
    constant_seconds: float


@dataclass(frozen=True, slots=True)
class Estimate(ShownInNotebooks):
    """Predicted cost of a plan.

    Attributes:
        iteration_seconds: from the barrier to the end of the slowest device's update.
        peak_memory_bytes: maximum over all devices.
        feasible: whether the plan fits into the memory of every device.
        reason: device with the largest shortfall, and the shortfall; None if the plan is feasible.
        critical_device: device that `breakdown` describes.
        memory_by_device: peak bytes, in the order of the plan's devices.
        memory_parts: parts of these bytes, in the same order.
    """

    iteration_seconds: float
    peak_memory_bytes: int
    feasible: bool
    reason: str | None
    breakdown: Breakdown
    critical_device: Device
    memory_by_device: tuple[tuple[Device, int], ...]
    memory_parts: tuple[MemoryParts, ...]

    def __repr__(self) -> str:
        return f"<Estimate {self.words}>"

    @property
    def words(self) -> str:
        """Return `0.123 s, 3.2 GiB`, with the reason why it does not fit, if it does not."""
        fits = "" if self.feasible else f", {self.reason}"
        return f"{self.iteration_seconds:.4g} s, {self.peak_memory_bytes / 2**30:.1f} GiB{fits}"


def estimate(  # noqa: PLR0913 - what a cost depends on
    plan: Plan,
    *,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    optimizer: Optimizer = "adam",
    runtime: Runtime | None = None,
) -> Estimate:
    """Estimate the plan's cost on this cluster with these profiles.

    Raises ValueError if the plan does not match the model or the cluster, or if a profile is missing.
    """
    rows = least_rows(model, plan.global_batch_size)
    return estimate_with_context(plan, CostContext(model, cluster, profiles, optimizer, runtime or Runtime(), rows))


def estimate_with_context(plan: Plan, context: CostContext) -> Estimate:
    """Estimate the plan's cost in a shared context. Raises ValueError for fewer rows than the model needs at once."""
    if (refusal := rows_refusal(plan, context)) is not None:
        raise ValueError(refusal)
    plan_times, parts = _times_and_memory(plan, context)
    by_device = _by_device(plan, parts)
    return _estimate(plan_times, parts, by_device, memory_shortfalls(by_device, context))


def estimate_if_feasible(plan: Plan, context: CostContext) -> Estimate | None:
    """Estimate the plan's cost if it fits into memory; return None, without a replay, if it does not, or has too few rows."""
    if rows_refusal(plan, context) is not None:
        return None
    plan_times, parts = _times_and_memory(plan, context)
    by_device = _by_device(plan, parts)
    return _estimate(plan_times, parts, by_device, None) if memory_shortfalls(by_device, context) is None else None


def rows_refusal(plan: Plan, context: CostContext) -> str | None:
    """Return why the plan computes too few rows at once for the model; None if it does not."""
    if context.least_rows == 1:
        return None
    for number, stage in enumerate(plan.stages):
        for run in stage.layers:
            if min(run.rows) < context.least_rows:
                why = least_rows_words(context.model, plan.global_batch_size)
                return f"stage {number}, layers {run.first}…{run.end - 1}: a replica computes {min(run.rows)} at once, but {why}"
    return None


def _estimate(
    plan_times: PlanTimes, parts: tuple[MemoryParts, ...], by_device: tuple[tuple[Device, int], ...], reason: str | None
) -> Estimate:
    end = _slowest(plan_times)
    return Estimate(
        iteration_seconds=end.seconds,
        peak_memory_bytes=max(size for _, size in by_device),
        feasible=reason is None,
        reason=reason,
        breakdown=end.breakdown(),
        critical_device=end.device(),
        memory_by_device=by_device,
        memory_parts=parts,
    )


def iteration_seconds(plan: Plan, context: CostContext) -> float:
    """Estimate the seconds of an iteration alone."""
    check_plan(plan, context)
    return _slowest(PlanTimes(plan, context)).seconds


def memory_by_device(plan: Plan, context: CostContext) -> tuple[tuple[Device, int], ...]:
    """Return the peak bytes of every device, in the order of the plan's devices."""
    _, parts = _times_and_memory(plan, context)
    return _by_device(plan, parts)


def _times_and_memory(plan: Plan, context: CostContext) -> tuple[PlanTimes, tuple[MemoryParts, ...]]:
    check_plan(plan, context)
    plan_times = PlanTimes(plan, context)
    return plan_times, _memory_parts(plan_times)


def _by_device(plan: Plan, parts: tuple[MemoryParts, ...]) -> tuple[tuple[Device, int], ...]:
    # Many devices share one parts object, so each is added up once.
    totals = {number: part.total_bytes for number, part in {id(part): part for part in parts}.items()}
    return tuple(zip(plan.devices, (totals[id(part)] for part in parts), strict=True))


def _memory_parts(plan_times: PlanTimes) -> tuple[MemoryParts, ...]:
    plan = plan_times.plan
    parts: list[MemoryParts] = []
    for index, pipeline in enumerate(plan.pipelines):
        stages, batches = len(pipeline.stages), pipeline.micro_batches
        chunks = plan_times.context.runtime.chunks_of(batches, pipeline.layer_counts)
        for number, stage in enumerate(pipeline.stages):
            parts += stage_memory(
                stage,
                plan_times.layouts[index, number],
                plan_times.context,
                in_flight_count=in_flight_micro_batches(plan.schedule, batches, number, stages, chunks),
                micro_batches=batches,
                divided_sides=plan_times.divided_sides(index, number),
                mixed_sharding_layers=plan_times.mixed_sharding_layers,
            )
    return tuple(parts)


def memory_shortfalls(by_device: tuple[tuple[Device, int], ...], context: CostContext) -> str | None:
    """Describe the device with the largest memory shortfall; return None if the plan fits."""
    memory, cluster = context.memory_of_node, context.cluster
    if all(size <= memory[device.node] for device, size in by_device):
        return None
    device, device_bytes = max(by_device, key=lambda item: item[1] - memory[item[0].node])
    accelerator = cluster.accelerator_of(device)
    return (
        f"device {device} ({accelerator.name}) lacks {_format_shortfall(device_bytes - accelerator.memory_bytes)}: the plan needs {_format_shortfall(device_bytes)} there, "
        f"it has {_format_shortfall(accelerator.memory_bytes)}"
    )


def _format_shortfall(num_bytes: int) -> str:
    # One decimal more than elsewhere: a shortfall is often small.
    return format_bytes(num_bytes, decimals=2)


@dataclass(frozen=True, slots=True)
class _DeviceEnd:
    """End of the iteration on the devices of one worker with one accelerator."""

    seconds: float
    plan_times: PlanTimes
    key: StageKey
    worker: int
    accelerator: str
    times: StageReplayTimes
    optimizer_step: OptimizerStep
    update_seconds: float

    def breakdown(self) -> Breakdown:
        stage, number = self.plan_times.stages[self.key], self.worker
        worker = stage.workers[number]
        batches = self.plan_times.plan.pipelines[self.key[0]].micro_batches
        both = (worker.forward, worker.backward)
        ended = self.times.ends[number]
        summed = max(ended, self.optimizer_step.gradients_end)
        return Breakdown(
            compute_seconds=batches * sum(pass_time.compute_seconds for pass_time in both),
            tensor_sync_seconds=batches * sum(pass_time.sync_seconds for pass_time in both),
            sharding_seconds=batches * sum(pass_time.sharding_seconds for pass_time in both)
            + worker.first_gather_seconds
            + self.optimizer_step.all_gather_seconds,
            redistribution_seconds=batches * sum(pass_time.redistribution_seconds for pass_time in both),
            point_to_point_seconds=self.times.transit_seconds[number],
            bubble_seconds=self.times.idle_seconds[number],
            gradient_sync_seconds=summed - ended + worker.last_backward_seconds - worker.backward.seconds,
            shared_weight_sync_seconds=max(summed, self.optimizer_step.tied_gradients_end) - summed,
            update_seconds=self.update_seconds,
            constant_seconds=self.plan_times.context.runtime.constant_seconds,
        )

    def device(self) -> Device:
        """Return the first of these devices in the plan."""
        stage = self.plan_times.stages[self.key]
        accelerator_of = self.plan_times.context.accelerator_of_node
        return next(
            device
            for index, device in enumerate(stage.stage.devices)
            if stage.worker_index(stage.layouts[0].position(index).replica) == self.worker
            and accelerator_of[device.node] == self.accelerator
        )


def _slowest(plan_times: PlanTimes) -> _DeviceEnd:
    """Return the end of the devices that end last; the first of equals, in plan order."""
    times, last = stage_end_times(plan_times)
    return max(_ends(plan_times, times, last), key=lambda end: end.seconds)


def stage_end_times(plan_times: PlanTimes) -> tuple[dict[StageKey, StageReplayTimes], dict[StageKey, OptimizerStep]]:
    """Return the times of every stage's workers, and its optimizer step."""
    times = replay_pipelines(plan_times)
    ends = {key: _stage_end(plan_times.stages[key], stage_times) for key, stage_times in times.items()}
    return times, optimizer_steps(plan_times, gradient_reductions(plan_times), ends)


def _stage_end(stage: StageTimes, times: StageReplayTimes) -> StageEnd:
    both = list(zip(times.replay_ends, stage.workers, strict=True))
    return StageEnd(
        max(times.ends),
        max(end - worker.last_backward_seconds for end, worker in both),
        max(end + worker.unfinished_reduce_seconds for end, worker in both),
    )


def _ends(
    plan_times: PlanTimes, times: dict[StageKey, StageReplayTimes], optimizer_steps: dict[StageKey, OptimizerStep]
) -> Iterator[_DeviceEnd]:
    constant = plan_times.context.runtime.constant_seconds
    accelerator_of = plan_times.context.accelerator_of_node
    for key, stage in plan_times.stages.items():
        after, ends = optimizer_steps[key], times[key].ends
        slowest: dict[str, int] = {}
        for replica, nodes in enumerate(stage.layouts[0].tensor_groups):
            worker = stage.worker_index(replica)
            for node in nodes:
                other = slowest.setdefault(accelerator_of[node], worker)
                if ends[worker] > ends[other]:
                    slowest[accelerator_of[node]] = worker
        for accelerator, worker in slowest.items():
            update = stage_update_seconds(plan_times, key, accelerator)
            summed = max(ends[worker], after.gradients_end, after.tied_gradients_end)
            seconds = summed + update + after.all_gather_seconds + constant
            yield _DeviceEnd(seconds, plan_times, key, worker, accelerator, times[key], after, update)
