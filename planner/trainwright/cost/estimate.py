"""The estimate of a plan: an exact replay of its iteration, and the memory of every device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.cluster import Cluster, Device
from trainwright.cost.checks import check_plan
from trainwright.cost.finish import Last, StageEnd, last_steps, stage_update_seconds
from trainwright.cost.memory import MemoryParts, in_flight, stage_memory
from trainwright.cost.pace import Paces, StageKey
from trainwright.cost.pipelines import StageTimes, replay_pipelines
from trainwright.cost.setting import Setting
from trainwright.cost.stage_pace import StagePace
from trainwright.cost.syncs import gradient_syncs
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.quantity import size
from trainwright.runtime import Runtime
from trainwright.training import Optimizer


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of the critical device goes, the one that ends last; the parts add up to the iteration.

    Attributes:
        compute_seconds: forwards and backwards.
        tensor_sync_seconds: tensor all-reduces inside them.
        sharding_seconds: collecting sharded weights, as far as computation does not hide it.
        redistribution_seconds: moving rows between layers of a stage that are arranged differently.
        point_to_point_seconds: waiting while a message from a neighbouring stage is on its way.
        bubble_seconds: waiting before that message was even sent.
        gradient_sync_seconds: by how much sums of gradients lengthen the last backward, and from its end until they
            are done, waiting for slower replicas included.
        shared_weight_sync_seconds: from there until those of tied weights are summed over their owners, waiting
            for the other owners included.
        update_seconds: the optimizer.
        constant_seconds: what the runtime takes for every iteration.
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
class Estimate:
    """What a plan costs.

    Attributes:
        iteration_seconds: from the barrier to the end of the slowest device's update.
        peak_memory_bytes: of the device that holds most.
        feasible: whether every device has the memory.
        reason: which device lacks how much, where it is not feasible; else None.
        critical_device: the one whose time `breakdown` tells.
        memory_by_device: peak bytes in the order of the plan's devices.
        memory_parts: what they are made of, in the same order.
    """

    iteration_seconds: float
    peak_memory_bytes: int
    feasible: bool
    reason: str | None
    breakdown: Breakdown
    critical_device: Device
    memory_by_device: tuple[tuple[Device, int], ...]
    memory_parts: tuple[MemoryParts, ...]


def estimate(  # noqa: PLR0913 - what a cost depends on
    plan: Plan,
    *,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    optimizer: Optimizer = "adam",
    runtime: Runtime | None = None,
) -> Estimate:
    """What the plan costs on this cluster, by these profiles.

    Raises ValueError for a plan that does not belong to model or cluster, or that lacks a profile.
    """
    return estimate_in(plan, Setting(model, cluster, profiles, optimizer, runtime or Runtime()))


def estimate_in(plan: Plan, setting: Setting) -> Estimate:
    """The same as `estimate`, for callers that hold a setting."""
    paces, parts = _with_memory(plan, setting)
    by_device = _by_device(plan, parts)
    return _estimate(paces, parts, by_device, lacking_memory(by_device, setting))


def fitting_estimate(plan: Plan, setting: Setting) -> Estimate | None:
    """The same where every device has the memory; None, and sooner, where one has not."""
    paces, parts = _with_memory(plan, setting)
    by_device = _by_device(plan, parts)
    return _estimate(paces, parts, by_device, None) if lacking_memory(by_device, setting) is None else None


def _estimate(
    paces: Paces, parts: tuple[MemoryParts, ...], by_device: tuple[tuple[Device, int], ...], reason: str | None
) -> Estimate:
    end = _slowest(paces)
    return Estimate(
        iteration_seconds=end.seconds,
        peak_memory_bytes=max(held for _, held in by_device),
        feasible=reason is None,
        reason=reason,
        breakdown=end.breakdown(),
        critical_device=end.device(),
        memory_by_device=by_device,
        memory_parts=parts,
    )


def memory_by_device(plan: Plan, setting: Setting) -> tuple[tuple[Device, int], ...]:
    """Peak bytes of every device, in the order of the plan's devices."""
    _, parts = _with_memory(plan, setting)
    return _by_device(plan, parts)


def _with_memory(plan: Plan, setting: Setting) -> tuple[Paces, tuple[MemoryParts, ...]]:
    check_plan(plan, setting)
    paces = Paces(plan, setting)
    return paces, _memory_parts(paces)


def _by_device(plan: Plan, parts: tuple[MemoryParts, ...]) -> tuple[tuple[Device, int], ...]:
    # Many devices have the same parts: they are added up once.
    totals = {number: part.total_bytes for number, part in {id(part): part for part in parts}.items()}
    return tuple(zip(plan.devices, (totals[id(part)] for part in parts), strict=True))


def _memory_parts(paces: Paces) -> tuple[MemoryParts, ...]:
    plan = paces.plan
    found: list[MemoryParts] = []
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            kept = in_flight(plan.schedule, pipeline.micro_batches, number, len(pipeline.stages))
            seats = paces.seats[index, number]
            found += stage_memory(
                stage,
                seats,
                paces.setting,
                kept=kept,
                micro_batches=pipeline.micro_batches,
                unlike_layers=paces.unlike_layers,
            )
    return tuple(found)


def lacking_memory(by_device: tuple[tuple[Device, int], ...], setting: Setting) -> str | None:
    """Which device lacks most memory and how much, in words; None where all fit."""
    memory, cluster = setting.memory_of_node, setting.cluster
    if all(held <= memory[device.node] for device, held in by_device):
        return None
    device, held = max(by_device, key=lambda item: item[1] - memory[item[0].node])
    accelerator = cluster.accelerator_of(device)
    return (
        f"device {device} ({accelerator.name}) lacks {_told(held - accelerator.memory_bytes)}: the plan needs {_told(held)} there, "
        f"it has {_told(accelerator.memory_bytes)}"
    )


def _told(num_bytes: int) -> str:
    # With one decimal more than elsewhere: what lacks is often little.
    return size(num_bytes, decimals=2)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the iteration for the devices of one worker with one accelerator."""

    seconds: float
    paces: Paces
    key: StageKey
    worker: int
    accelerator: str
    times: StageTimes
    last: Last
    update_seconds: float

    def breakdown(self) -> Breakdown:
        stage, number = self.paces.stages[self.key], self.worker
        worker = stage.workers[number]
        batches = self.paces.plan.pipelines[self.key[0]].micro_batches
        both = (worker.forward, worker.backward)
        ended = self.times.ends[number]
        summed = max(ended, self.last.gradients_end)
        return Breakdown(
            compute_seconds=batches * sum(one.compute_seconds for one in both),
            tensor_sync_seconds=batches * sum(one.sync_seconds for one in both),
            sharding_seconds=batches * sum(one.sharding_seconds for one in both) + self.last.gather_seconds,
            redistribution_seconds=batches * sum(one.redistribution_seconds for one in both),
            point_to_point_seconds=self.times.transit[number],
            bubble_seconds=self.times.idle[number],
            gradient_sync_seconds=summed - ended + worker.last_backward_seconds - worker.backward.seconds,
            shared_weight_sync_seconds=max(summed, self.last.shared_end) - summed,
            update_seconds=self.update_seconds,
            constant_seconds=self.paces.setting.runtime.constant_seconds,
        )

    def device(self) -> Device:
        """The first of them in the plan."""
        stage = self.paces.stages[self.key]
        accelerator_of = self.paces.setting.accelerator_of_node
        seats = stage.seats[0]
        return next(
            device
            for index, device in enumerate(stage.stage.devices)
            if stage.worker_of(seats.place(index)[0]) == self.worker and accelerator_of[device.node] == self.accelerator
        )


def _slowest(paces: Paces) -> _End:
    """The first of those that end last, in the order of the plan's devices."""
    times, last = stage_moments(paces)
    return max(_ends(paces, times, last), key=lambda end: end.seconds)


def stage_moments(paces: Paces) -> tuple[dict[StageKey, StageTimes], dict[StageKey, Last]]:
    """When the workers of every stage are done, and when what the stage does behind that is."""
    times = replay_pipelines(paces)
    ends = {key: _stage_end(paces.stages[key], found) for key, found in times.items()}
    return times, last_steps(paces, gradient_syncs(paces), ends)


def _stage_end(stage: StagePace, times: StageTimes) -> StageEnd:
    both = list(zip(times.computed, stage.workers, strict=True))
    return StageEnd(
        max(times.ends),
        max(end - worker.last_backward_seconds for end, worker in both),
        max(end + worker.left_seconds for end, worker in both),
    )


def _ends(paces: Paces, times: dict[StageKey, StageTimes], last: dict[StageKey, Last]) -> Iterator[_End]:
    constant = paces.setting.runtime.constant_seconds
    accelerator_of = paces.setting.accelerator_of_node
    for key, stage in paces.stages.items():
        after, ends = last[key], times[key].ends
        slowest: dict[str, int] = {}
        for replica, nodes in enumerate(stage.seats[0].replicas):
            worker = stage.worker_of(replica)
            for node in nodes:
                other = slowest.setdefault(accelerator_of[node], worker)
                if ends[worker] > ends[other]:
                    slowest[accelerator_of[node]] = worker
        for accelerator, worker in slowest.items():
            update = stage_update_seconds(paces, key, accelerator)
            summed = max(ends[worker], after.gradients_end, after.shared_end)
            seconds = summed + update + after.gather_seconds + constant
            yield _End(seconds, paces, key, worker, accelerator, times[key], after, update)
