"""Moves of devices: to another stage, out of the plan, into another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, pairwise

from trainwright.cluster import Device
from trainwright.cost.stage_times import PlanTimes
from trainwright.plan import Plan
from trainwright.search.auto.layer_rebalancing import StageConfig, stage_configs, with_stage_configs
from trainwright.search.problem import Problem

Devices = tuple[Device, ...]
Move = Callable[[], Plan]
"""Function that builds the changed plan."""
MAX_NODES = 4
"""Maximum nodes tried individually, of a stage and of unused devices."""


@dataclass(frozen=True)
class EditablePipeline:
    """Editable pipeline of a plan.

    Attributes:
        seconds: [stage] micro-batch seconds of the slowest worker.
    """

    plan: Plan
    index: int
    stages: tuple[StageConfig, ...]
    seconds: tuple[float, ...]
    unused_devices: Devices

    @property
    def unused_by_node(self) -> list[Devices]:
        """Return unused devices by node, for a few nodes spread over the cluster."""
        devices_by_node = list(group_by_node(self.unused_devices).values())
        return devices_by_node[:: -(-len(devices_by_node) // MAX_NODES) or 1]

    @property
    def slowest_first(self) -> list[int]:
        """Return stage indices, slowest first."""
        return sorted(range(len(self.stages)), key=lambda number: -self.seconds[number])

    @property
    def rows(self) -> int:
        return self.plan.pipelines[self.index].micro_batch_size

    def replace_stages(self, changed: dict[int, StageConfig]) -> Plan:
        """Return the plan with these stages replaced."""
        stages = [changed.get(number, stage) for number, stage in enumerate(self.stages)]
        return with_stage_configs(self.plan, self.index, stages)


def group_by_node(devices: Devices) -> dict[str, Devices]:
    """Group devices by node, in order."""
    devices_by_node: dict[str, Devices] = {}
    for device in devices:
        devices_by_node[device.node] = (*devices_by_node.get(device.node, ()), device)
    return devices_by_node


def editable_pipelines(plan: Plan, problem: Problem) -> list[EditablePipeline]:
    """Return the plan's pipelines in editable form."""
    plan_times = PlanTimes(plan, problem.cost_context)
    used = set(plan.devices)
    unused_devices = tuple(device for device in problem.devices if device not in used)
    return [
        EditablePipeline(
            plan,
            index,
            stage_configs(pipeline),
            tuple(
                max(
                    worker.forward.seconds + worker.backward.seconds
                    for worker in plan_times.stages[index, number].workers
                )
                for number in range(len(pipeline.stages))
            ),
            unused_devices,
        )
        for index, pipeline in enumerate(plan.pipelines)
    ]


MAX_SWAP_DISTANCE = 4
"""Maximum distance of stages that swap devices."""


def move_devices(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Move half, a quarter or one tensor group of devices to a neighbouring stage, or swap two stages."""
    for pipeline in editable:
        stages = pipeline.stages
        slower_of_pair = [max(pair) for pair in pairwise(pipeline.seconds)]
        for number in sorted(range(len(slower_of_pair)), key=lambda number: -slower_of_pair[number]):
            for giver, taker in ((number, number + 1), (number + 1, number)):
                step = max(stages[giver].max_tensor_degree, stages[taker].max_tensor_degree)
                data = len(stages[giver].devices) // step
                for count in dict.fromkeys((data // 2, data // 4, 1)):
                    if 0 < count < data and len(stages[taker].devices) + count * step <= pipeline.rows * step:
                        yield partial(_hand_over_devices, pipeline, giver, taker, count * step)
            yield partial(_swap_devices, pipeline, number, number + 1)
        # Adjacent stages are swapped above.
        for number, other in combinations(range(len(stages)), 2):
            if 1 < other - number <= MAX_SWAP_DISTANCE:
                yield partial(_swap_devices, pipeline, number, other)


def _hand_over_devices(pipeline: EditablePipeline, giver: int, taker: int, count: int) -> Plan:
    giver_devices, taker_devices = pipeline.stages[giver].devices, pipeline.stages[taker].devices
    if giver < taker:
        giver_devices, taker_devices = giver_devices[:-count], (*giver_devices[-count:], *taker_devices)
    else:
        giver_devices, taker_devices = giver_devices[count:], (*taker_devices, *giver_devices[:count])
    changed = {
        number: pipeline.stages[number].with_devices(devices, pipeline.rows)
        for number, devices in ((giver, giver_devices), (taker, taker_devices))
    }
    return pipeline.replace_stages(changed)


def change_devices(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Remove, add or reorder devices of one stage.

    Removal takes half or one node's devices; orders are node by node or round-robin over nodes.
    """
    for pipeline in editable:
        unused_by_node = pipeline.unused_by_node
        for number in pipeline.slowest_first:
            stage = pipeline.stages[number]
            nodes = group_by_node(stage.devices)
            with_unused = _device_supersets(stage, unused_by_node)
            for devices in dict.fromkeys((*_reorderings(nodes), *_device_subsets(stage.devices, nodes), *with_unused)):
                if devices != stage.devices:
                    yield partial(_with_devices, pipeline, number, devices)


def _reorderings(nodes: dict[str, Devices]) -> Iterator[Devices]:
    if len(nodes) > 1:
        most = max(map(len, nodes.values()))
        yield tuple(some[slot] for slot in range(most) for some in nodes.values() if slot < len(some))
        yield tuple(device for some in nodes.values() for device in some)


def _device_subsets(devices: Devices, nodes: dict[str, Devices]) -> Iterator[Devices]:
    if half := len(devices) // 2:
        yield from (devices[:half], devices[half:])
    if len(nodes) > 1:
        for node in islice(nodes, MAX_NODES):
            yield tuple(device for device in devices if device.node != node)


def _device_supersets(stage: StageConfig, unused_by_node: Sequence[Devices]) -> Iterator[Devices]:
    """Yield the stage's devices plus the most or fewest usable devices of a node."""
    step = stage.max_tensor_degree
    for some in unused_by_node:
        for count in dict.fromkeys((len(some) // step * step, step)):
            if 0 < count <= len(some):
                yield (*stage.devices, *some[:count])


def _with_devices(pipeline: EditablePipeline, number: int, devices: Devices) -> Plan:
    return pipeline.replace_stages({number: pipeline.stages[number].with_devices(devices, pipeline.rows)})


def _swap_devices(pipeline: EditablePipeline, first: int, second: int) -> Plan:
    first_config, other = pipeline.stages[first], pipeline.stages[second]
    return pipeline.replace_stages({first: other, second: first_config})
