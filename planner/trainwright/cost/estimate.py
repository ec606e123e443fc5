"""The estimate of a plan: an exact replay of its iteration, and the memory of every device."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainwright.cluster import Cluster, Device
from trainwright.cost import memory
from trainwright.cost.compute import UnitSeconds, tensor_rings, unit_seconds, update_seconds
from trainwright.cost.layout import Unit, only_pipeline, units
from trainwright.cost.replay import Replay, Timeline, Worker
from trainwright.cost.schedule import operations
from trainwright.cost.setting import Setting
from trainwright.cost.syncs import Syncs, channels, gradient_syncs
from trainwright.model import Model
from trainwright.plan import Pipeline, Plan
from trainwright.profiles import Profiles
from trainwright.training import Optimizer

MAX_REPLAYED_MICRO_BATCHES = 128
"""Longer pipelines are replayed up to here (or eight times their stages) and go on at their steady pace."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of the critical device goes, the one that ends last; the parts add up to the iteration.

    Attributes:
        compute_seconds: forwards and backwards.
        tensor_sync_seconds: tensor all-reduces inside them.
        point_to_point_seconds: waiting while a message from a neighbouring stage is on its way.
        bubble_seconds: waiting before that message was even sent.
        gradient_sync_seconds: from the last backward until the gradients are summed over the replicas, waiting for
            slower replicas included.
        shared_weight_sync_seconds: from there until those of tied weights are summed over their owners, waiting
            for the other owners included.
        update_seconds: the optimizer.
    """

    compute_seconds: float
    tensor_sync_seconds: float
    point_to_point_seconds: float
    bubble_seconds: float
    gradient_sync_seconds: float
    shared_weight_sync_seconds: float
    update_seconds: float


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
    """

    iteration_seconds: float
    peak_memory_bytes: int
    feasible: bool
    reason: str | None
    breakdown: Breakdown
    critical_device: Device
    memory_by_device: tuple[tuple[Device, int], ...]


def estimate(
    plan: Plan, *, model: Model, cluster: Cluster, profiles: Profiles, optimizer: Optimizer = "adam"
) -> Estimate:
    """What the plan costs on this cluster, by these profiles.

    Raises ValueError for a plan that does not belong to model or cluster, that lacks a profile, or that uses what
    the cost model does not cover (several pipelines, sharding, degrees that change inside a stage).
    """
    return estimate_in(plan, Setting(model, cluster, profiles, optimizer))


def estimate_in(plan: Plan, setting: Setting) -> Estimate:
    """The same as `estimate`, for callers that hold a setting."""
    pipeline = only_pipeline(plan, setting)
    by_device = memory_by_device(plan, setting)
    reason = lacking_memory(by_device, setting)
    seconds, breakdown, critical = _iteration(plan, pipeline, setting)
    return Estimate(
        iteration_seconds=seconds,
        peak_memory_bytes=max(held for _, held in by_device),
        feasible=reason is None,
        reason=reason,
        breakdown=breakdown,
        critical_device=critical,
        memory_by_device=by_device,
    )


def memory_by_device(plan: Plan, setting: Setting) -> tuple[tuple[Device, int], ...]:
    """Peak bytes of every device, in the order of the plan's devices."""
    pipeline = only_pipeline(plan, setting)
    held: dict[Device, int] = {}
    seen: dict[tuple[int, str, int], int] = {}
    for number, (stage, replicas) in enumerate(zip(pipeline.stages, units(pipeline), strict=True)):
        kept = memory.in_flight(plan.schedule, pipeline.micro_batches, number, len(pipeline.stages))
        for unit in replicas:
            for device in unit.devices:
                accelerator = setting.cluster.accelerator_of(device).name
                key = (number, accelerator, unit.rows)
                if key not in seen:
                    seen[key] = memory.device_bytes(unit, stage, accelerator, setting, kept=kept)
                held[device] = seen[key]
    return tuple((device, held[device]) for device in plan.devices)


def lacking_memory(by_device: tuple[tuple[Device, int], ...], setting: Setting) -> str | None:
    """Which device lacks most memory and how much, in words; None where all fit."""
    cluster = setting.cluster
    device, held = max(by_device, key=lambda item: item[1] - cluster.accelerator_of(item[0]).memory_bytes)
    accelerator = cluster.accelerator_of(device)
    lack = held - accelerator.memory_bytes
    if lack <= 0:
        return None
    return (
        f"device {device} ({accelerator.name}) lacks {_gibibytes(lack)}: the plan needs {_gibibytes(held)} there, "
        f"it has {_gibibytes(accelerator.memory_bytes)}"
    )


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"


def _iteration(plan: Plan, pipeline: Pipeline, setting: Setting) -> tuple[float, Breakdown, Device]:
    """Seconds of one iteration; past the replayed micro-batches the pace of the last ones goes on."""
    replayed = max(MAX_REPLAYED_MICRO_BATCHES, 8 * len(pipeline.stages))
    scene = _Scene(plan, pipeline, setting)
    if pipeline.micro_batches <= replayed:
        return scene.outcome(pipeline.micro_batches)
    span = replayed // 4
    short, breakdown_short, _ = scene.outcome(replayed - span)
    long, breakdown_long, critical = scene.outcome(replayed)
    times = (pipeline.micro_batches - replayed) / span
    parts = {
        part.name: getattr(breakdown_long, part.name)
        + times * (getattr(breakdown_long, part.name) - getattr(breakdown_short, part.name))
        for part in fields(Breakdown)
    }
    return long + times * (long - short), Breakdown(**parts), critical


class _Scene:
    """Everything about a plan's iteration but the number of micro-batches."""

    def __init__(self, plan: Plan, pipeline: Pipeline, setting: Setting) -> None:
        self.plan, self.setting = plan, setting
        self.stages = units(pipeline)
        self.units: tuple[Unit, ...] = tuple(unit for replicas in self.stages for unit in replicas)
        rings = tensor_rings(self.stages, setting)
        self.seconds: tuple[UnitSeconds, ...] = tuple(
            unit_seconds(
                unit,
                pipeline.stages[unit.stage],
                setting,
                beside=tuple(ring for other, ring in rings.items() if other is not unit) if unit in rings else (),
            )
            for unit in self.units
        )
        self.channels = channels(self.stages, pipeline, setting)
        self.syncs: Syncs = gradient_syncs(self.stages, pipeline, setting)
        self.updates = {
            device: update_seconds(pipeline.stages[unit.stage], setting.cluster.accelerator_of(device).name, setting)
            for unit in self.units
            for device in unit.devices
        }

    def outcome(self, micro_batches: int) -> tuple[float, Breakdown, Device]:
        """Seconds, their parts on the critical device, and that device."""
        schedule, stages = self.plan.schedule, len(self.stages)
        workers = tuple(
            Worker(
                operations(schedule, micro_batches, unit.stage, stages),
                seconds.forward_seconds,
                seconds.backward_seconds,
            )
            for unit, seconds in zip(self.units, self.seconds, strict=True)
        )
        timeline = Replay(workers, self.channels, self.syncs.syncs, self.setting.fabric).run()
        return self._critical(timeline, micro_batches)

    def _critical(self, timeline: Timeline, micro_batches: int) -> tuple[float, Breakdown, Device]:
        best: tuple[float, int, Device, float, float] | None = None
        for index, unit in enumerate(self.units):
            for tensor_index, device in enumerate(unit.devices):
                numbers = self.syncs.gradient.get((unit.stage, tensor_index))
                summed = timeline.sync_ends[numbers] if numbers is not None else timeline.ends[index]
                shared = max(
                    (timeline.sync_ends[n] for n in self.syncs.shared.get((unit.stage, tensor_index), ())),
                    default=summed,
                )
                end = shared + self.updates[device]
                if best is None or end > best[0]:
                    best = (end, index, device, summed, shared)
        assert best is not None
        end, index, device, summed, shared = best
        seconds = self.seconds[index]
        return (
            end,
            Breakdown(
                compute_seconds=micro_batches * (seconds.forward_compute_seconds + seconds.backward_compute_seconds),
                tensor_sync_seconds=micro_batches * (seconds.forward_sync_seconds + seconds.backward_sync_seconds),
                point_to_point_seconds=timeline.transit[index],
                bubble_seconds=timeline.idle[index],
                gradient_sync_seconds=summed - timeline.ends[index],
                shared_weight_sync_seconds=shared - summed,
                update_seconds=self.updates[device],
            ),
            device,
        )
