"""Nearest plan that a trainer supports: pure, and from the plan alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, log, log2

from trainwright.cluster import Device
from trainwright.exports.capabilities import Capabilities, is_expressible
from trainwright.exports.uniform_shape import UniformShape, even_ends, ranks
from trainwright.plan import Plan, Schedule, divisors
from trainwright.strategy import Sharding, Strategy

IDLE_WEIGHT = 8.0
"""Distance of idle devices: that of a degree that is doubled for an eighth of the plan's computation."""
CROSSING_WEIGHT = 4.0
"""Distance of tensor groups that span more nodes than they have to, if all of them do; for stages half of that."""
MAX_IDLE_DEVICES = 64
"""Devices of which the shapes use any number less than all; beyond, they use powers of two less."""


def nearest_plan(plan: Plan, capabilities: Capabilities) -> Plan:
    """Return the plan itself if the trainer supports it, else the nearest one that it supports."""
    return plan if is_expressible(plan, capabilities) else nearest_shapes(plan, capabilities)[0].plan()


def nearest_shapes(plan: Plan, capabilities: Capabilities) -> list[UniformShape]:
    """Return shapes that the trainer supports, one for each choice of degrees and devices, nearest first.

    Devices keep their order, stages get layers by what their devices compute in the plan, and memory is saved by as much
    or more where the trainer can.
    """
    original = _Original.of(plan)
    by_distance = sorted(
        _shapes(original, capabilities), key=lambda scored: (scored[0], -len(scored[1].devices), scored[1].ends)
    )
    return [shape for _, shape in by_distance]


@dataclass(frozen=True)
class _Original:
    """Plan as seen by the distance.

    Attributes:
        devices: in order of the layers that they compute.
        powers: layers × rows of an iteration that each of them computes, for itself.
        stages, tensor, data, rows: its (mean) degrees, and rows of a micro-batch on one replica.
        degrees: tensor degrees that the model is known to allow.
        recomputed: most recomputed layers of a stage.
        divides: whether some tensor group divides activations along the sequence.
    """

    plan: Plan
    devices: tuple[Device, ...]
    powers: tuple[float, ...]
    stages: float
    tensor: float
    data: float
    rows: float
    degrees: tuple[int, ...]
    sharding: Sharding
    recomputed: int
    divides: bool

    @classmethod
    def of(cls, plan: Plan) -> _Original:
        power, depth = {}, {}
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                for device in stage.devices:
                    power[device] = 0.0
                    depth[device] = stage.first + stage.end
                for run in stage.layers:
                    for group, rows in zip(run.strategy.tensor_groups(stage.devices), run.rows, strict=True):
                        for device in group:
                            power[device] += run.count * rows * pipeline.micro_batches / run.strategy.tensor
        devices = tuple(sorted(ranks(plan), key=depth.__getitem__))
        runs = [run for stage in plan.stages for run in stage.layers]
        weights = [run.count for run in runs]
        used = {run.strategy.tensor for run in runs}
        return cls(
            plan=plan,
            devices=devices,
            powers=tuple(power[device] for device in devices),
            stages=max(len(pipeline.stages) for pipeline in plan.pipelines),
            tensor=_mean([run.strategy.tensor for run in runs], weights),
            data=_mean([run.strategy.data for run in runs], weights) * len(plan.pipelines),
            rows=_mean([sum(run.rows) / run.strategy.data for run in runs], weights),
            degrees=tuple(degree for degree in range(1, max(used) + 1) if any(count % degree == 0 for count in used)),
            sharding=max((run.strategy.sharding for run in runs), key=tuple(Sharding).index),
            recomputed=max(sum(run.count for run in stage.layers if run.strategy.recompute) for stage in plan.stages),
            divides=any(run.strategy.effective.sequence_parallel for run in runs),
        )

    def keep(self, count: int) -> tuple[tuple[Device, ...], tuple[float, ...]]:
        """Return the `count` devices that compute most, in order, with their powers."""
        numbers = sorted(range(len(self.devices)), key=lambda number: (-self.powers[number], number))[:count]
        kept = sorted(numbers)
        return tuple(self.devices[number] for number in kept), tuple(self.powers[number] for number in kept)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted geometric mean."""
    return exp(sum(weight * log(value) for value, weight in zip(values, weights, strict=True)) / sum(weights))


def _shapes(original: _Original, capabilities: Capabilities) -> Iterator[tuple[float, UniformShape]]:
    plan = original.plan
    for count in _device_counts(len(original.devices)):
        devices, powers = original.keep(count)
        idle = 1 - sum(powers) / sum(original.powers)
        for tensor in original.degrees:
            if count % tensor:
                continue
            for data in divisors(count // tensor):
                stages = count // tensor // data
                if stages > plan.model_layers or plan.global_batch_size % data:
                    continue
                shardings = capabilities.shardings_of(stages, tensor, data)
                if not shardings or not capabilities.can_split(stages, tensor):
                    continue
                batch = plan.global_batch_size // data
                fitting = [rows for rows in divisors(batch) if capabilities.can_fill(stages, batch // rows)]
                if not fitting:
                    continue
                rows = min(fitting, key=lambda rows: abs(log2(rows / original.rows)))
                shape = UniformShape(
                    ends=_ends(plan.model_layers, stages, powers, uneven=capabilities.uneven_stages),
                    strategy=Strategy(
                        tensor,
                        data,
                        sharding=_nearest_sharding(original.sharding, shardings),
                        sequence_parallel=capabilities.sequence_parallel and original.divides and tensor > 1,
                    ),
                    rows=rows,
                    micro_batches=batch // rows,
                    recomputed_blocks=0,
                    schedule=_nearest_schedule(plan.schedule, capabilities.schedules_of(stages)),
                    devices=devices,
                    dtype=plan.dtype,
                )
                yield _distance(original, shape, idle), _with_recompute(shape, original.recomputed, capabilities)


def _device_counts(devices: int) -> list[int]:
    """Return the numbers of devices that are tried: a few less than all, and powers of two less."""
    few = range(devices, max(devices - MAX_IDLE_DEVICES, 0), -1)
    return [*few, *(devices >> power for power in range(1, devices.bit_length()) if devices >> power < few[-1])]


def _ends(layers: int, stages: int, powers: Sequence[float], *, uneven: bool) -> tuple[int, ...]:
    """Return the ends of the stages: even, or by the share of their devices, each with at least one layer."""
    if not uneven:
        return even_ends(layers, stages)
    width, total = len(powers) // stages, sum(powers)
    shares = [sum(powers[number * width : (number + 1) * width]) / total * layers for number in range(stages)]
    counts = [max(int(share), 1) for share in shares]
    while sum(counts) != layers:
        step = 1 if sum(counts) < layers else -1
        open_stages = [number for number in range(stages) if counts[number] + step >= 1]
        chosen = max(open_stages, key=lambda number: step * (shares[number] - counts[number]))
        counts[chosen] += step
    return tuple(accumulate(counts))


def _nearest_sharding(sharding: Sharding, shardings: frozenset[Sharding]) -> Sharding:
    """Return the next sharding that saves at least as much; else the one that saves most."""
    order = tuple(Sharding)
    enough = [other for other in order[order.index(sharding) :] if other in shardings]
    return enough[0] if enough else max(shardings, key=order.index)


def _nearest_schedule(schedule: Schedule, schedules: frozenset[Schedule]) -> Schedule:
    return schedule if schedule in schedules else Schedule.ONE_FORWARD_ONE_BACKWARD


def _with_recompute(shape: UniformShape, recomputed: int, capabilities: Capabilities) -> UniformShape:
    """Return the shape with at least as many recomputed blocks in each stage."""
    most = max(shape.blocks)
    count = min(recomputed, most) if capabilities.partial_recompute else most * (recomputed > 0)
    return replace(shape, recomputed_blocks=count)


def _distance(original: _Original, shape: UniformShape, idle: float) -> float:
    ratios = (
        len(shape.ends) / original.stages,
        shape.strategy.tensor / original.tensor,
        shape.strategy.data / original.data,
        shape.rows / original.rows,
    )
    crossing = _crossing(shape, shape.strategy.tensor) + _crossing(shape, shape.strategy.width) / 2
    return IDLE_WEIGHT * idle + CROSSING_WEIGHT * crossing + sum(abs(log2(ratio)) for ratio in ratios)


def _crossing(shape: UniformShape, width: int) -> float:
    """Return the share of groups of `width` consecutive ranks that span more nodes than they have to."""
    largest = max(Counter(device.node for device in shape.devices).values())
    groups = [shape.devices[start : start + width] for start in range(0, len(shape.devices), width)]
    return sum(len({device.node for device in group}) > -(-width // largest) for group in groups) / len(groups)
