"""A pipeline of a plan, taken apart so that something of it can be changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.cost.pace import Paces
from trainwright.plan import Plan
from trainwright.search.auto.setups import Setup, setups, with_setups
from trainwright.search.protocol import Problem

Devices = tuple[Device, ...]
Move = Callable[[], Plan]
"""Makes the plan that differs."""
MOST_NODES = 4
"""Nodes of a stage, and of those with devices that nobody uses, that are looked at one by one."""


@dataclass(frozen=True)
class Place:
    """A pipeline of a plan, taken apart.

    Attributes:
        seconds: by stage: what its slowest worker takes for a micro-batch.
        free: devices that plans may use, and this one does not.
    """

    plan: Plan
    index: int
    stages: tuple[Setup, ...]
    seconds: tuple[float, ...]
    free: Devices

    @property
    def spare(self) -> list[Devices]:
        """By node: free devices, of a few nodes spread over the cluster."""
        found = list(by_node(self.free).values())
        return found[:: -(-len(found) // MOST_NODES) or 1]

    @property
    def slowest_first(self) -> list[int]:
        """The stages' numbers: what betters the slowest betters all that wait for it."""
        return sorted(range(len(self.stages)), key=lambda number: -self.seconds[number])

    @property
    def rows(self) -> int:
        return self.plan.pipelines[self.index].micro_batch_size

    def put(self, changed: dict[int, Setup]) -> Plan:
        """The plan with these stages in place of those with their numbers."""
        stages = [changed.get(number, stage) for number, stage in enumerate(self.stages)]
        return with_setups(self.plan, self.index, stages)


def by_node(devices: Devices) -> dict[str, Devices]:
    """In their order."""
    found: dict[str, Devices] = {}
    for device in devices:
        found[device.node] = (*found.get(device.node, ()), device)
    return found


def places(plan: Plan, problem: Problem) -> list[Place]:
    """The plan's pipelines taken apart."""
    paces = Paces(plan, problem.setting)
    used = set(plan.devices)
    free = tuple(device for device in problem.devices if device not in used)
    return [
        Place(
            plan,
            index,
            setups(pipeline),
            tuple(
                max(worker.forward.seconds + worker.backward.seconds for worker in paces.stages[index, number].workers)
                for number in range(len(pipeline.stages))
            ),
            free,
        )
        for index, pipeline in enumerate(plan.pipelines)
    ]
