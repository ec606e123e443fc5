"""Enumeration of every plan that `auto` searches on a tiny problem, up to renamed devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations, groupby, permutations, product

from trainwright.cluster import Device
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.network import node_classes
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.problem import Problem
from trainwright.strategy import Sharding, Strategy

Places = tuple[tuple[Device, ...], ...]
"""The devices of a pipeline, stage by stage."""
Choice = tuple[int, tuple[int, ...], Sharding, bool]
"""A layer's (tensor degree, rows of every replica, sharding, recompute)."""


@dataclass
class PlanSpace:
    """All plans of 1F1B pipelines whose stages have one (tensor, data, rows) each and any sharding and recompute by layer.

    With `mixed`, layers of a stage may differ in (tensor, data, rows), too.

    Left out: sharding where there is nothing to share it with (data degree 1, the same times and bytes as none), and
    plans that another one becomes when interchangeable nodes, or slots of a node, change places.
    """

    problem: Problem
    mixed: bool = False
    _stages: dict[tuple[object, ...], list[Stage]] = field(default_factory=dict)
    _pipelines: dict[tuple[Places, int], list[Pipeline]] = field(default_factory=dict)

    def plans(self) -> Iterator[Plan]:
        """Yield every plan once."""
        layers, batch = len(self.problem.model.layers), self.problem.global_batch_size
        for places in self.arrangements():
            for shares in compositions(batch, len(places)):
                for pipelines in product(*(self._of_rows(one, rows) for one, rows in zip(places, shares, strict=True))):
                    yield Plan(layers, batch, pipelines)

    def size(self, most: float = math.inf) -> int:
        """Count the plans, up to the first number above `most`."""
        batch, total = self.problem.global_batch_size, 0
        for places in self.arrangements():
            for shares in compositions(batch, len(places)):
                total += math.prod(self._count(one, rows) for one, rows in zip(places, shares, strict=True))
            if total > most:
                break
        return total

    def arrangements(self) -> list[tuple[Places, ...]]:
        """Devices of the stages of all pipelines: any of the devices in any order, cut anywhere."""
        problem = self.problem
        most = min(len(problem.model.layers), problem.limits.max_pipeline_degree or math.inf)
        found = []
        for count in range(1, len(problem.devices) + 1):
            orders = {self._names(devices): devices for devices in permutations(problem.devices, count)}
            for devices in orders.values():
                for cuts in product((_SAME, _NEXT_STAGE, _NEXT_PIPELINE), repeat=count - 1):
                    places = _cut(devices, cuts)
                    if max(map(len, places)) <= most:
                        found.append(places)
        return found

    def _names(self, devices: tuple[Device, ...]) -> tuple[tuple[int, int, int], ...]:
        """Return for each device its node kind, and its node's and slot's indices in order of appearance."""
        cluster = self.problem.cluster
        kinds = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))
        nodes: dict[int, list[str]] = {}
        slots: dict[str, list[int]] = {}
        for device in devices:
            known = nodes.setdefault(kinds[device.node], [])
            if device.node not in known:
                known.append(device.node)
            slots.setdefault(device.node, []).append(device.slot)
        return tuple(
            (kinds[one.node], nodes[kinds[one.node]].index(one.node), slots[one.node].index(one.slot))
            for one in devices
        )

    def _of_rows(self, places: Places, rows: int) -> list[Pipeline]:
        """Return pipelines on these devices with `rows` rows per iteration."""
        key = places, rows
        if key not in self._pipelines:
            self._pipelines[key] = [
                Pipeline(rows // size, size, stages)
                for size in range(1, rows + 1)
                if rows % size == 0
                for cuts in self._cuts(len(places))
                for stages in product(
                    *(self._of_stage(*one, size) for one in zip(places, cuts, cuts[1:], strict=False))
                )
            ]
        return self._pipelines[key]

    def _cuts(self, stages: int) -> list[tuple[int, ...]]:
        layers = len(self.problem.model.layers)
        return [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]

    def _of_stage(self, devices: tuple[Device, ...], first: int, end: int, size: int) -> list[Stage]:
        """Return stages of these layers on these devices, for micro-batches of `size` rows."""
        key = devices, first, end, size
        if key not in self._stages:
            self._stages[key] = [
                Stage(devices, _runs(first, choices))
                for alike in self._layer_choices(devices, size)
                for choices in product(alike, repeat=end - first)
            ]
        return self._stages[key]

    def _layer_choices(self, devices: tuple[Device, ...], size: int) -> list[list[Choice]]:
        """Return lists of a layer's choices on these devices; all layers of a stage choose from the same list."""
        found = [
            [(tensor, rows, sharding, recompute) for sharding in _shardings(data) for recompute in (False, True)]
            for tensor, data in self._degrees(devices)
            for rows in compositions(size, data)
        ]
        return [list(chain.from_iterable(found))] if self.mixed else found

    def _degrees(self, devices: tuple[Device, ...]) -> list[tuple[int, int]]:
        """(tensor, data) whose product is their number, within the limits and profiled."""
        problem, limits = self.problem, self.problem.limits
        names = {problem.cluster.accelerator_of(device).name for device in devices}
        return [
            (tensor, len(devices) // tensor)
            for tensor in range(1, len(devices) + 1)
            if len(devices) % tensor == 0
            and problem.model.max_tensor_degree % tensor == 0
            and tensor <= (limits.max_tensor_degree or tensor)
            and len(devices) // tensor <= (limits.max_data_degree or len(devices))
            and all(
                problem.profiles.has(name, kind.name, tensor if kind.is_tensor_parallel else 1)
                for name in names
                for kind in problem.model.kinds
            )
        ]

    def _count(self, places: Places, rows: int) -> int:
        """Count the pipelines that `_of_rows` returns."""
        total = 0
        for size in range(1, rows + 1):
            if rows % size:
                continue
            for cuts in self._cuts(len(places)):
                total += math.prod(
                    sum(len(alike) ** (end - first) for alike in self._layer_choices(devices, size))
                    for devices, first, end in zip(places, cuts, cuts[1:], strict=False)
                )
        return total


_SAME, _NEXT_STAGE, _NEXT_PIPELINE = range(3)
"""What a device begins."""


def _cut(devices: tuple[Device, ...], cuts: tuple[int, ...]) -> tuple[Places, ...]:
    found = [[[devices[0]]]]
    for device, cut in zip(devices[1:], cuts, strict=True):
        if cut == _NEXT_PIPELINE:
            found.append([[device]])
        elif cut == _NEXT_STAGE:
            found[-1].append([device])
        else:
            found[-1][-1].append(device)
    return tuple(tuple(tuple(stage) for stage in pipeline) for pipeline in found)


def _shardings(data: int) -> tuple[Sharding, ...]:
    return tuple(Sharding) if data > 1 else (Sharding.NONE,)


def _runs(first: int, choices: tuple[Choice, ...]) -> tuple[LayerRun, ...]:
    """Merge consecutive layers with the same choice into runs."""
    found = []
    for (tensor, rows, sharding, recompute), alike in groupby(choices):
        count = len(list(alike))
        found.append(LayerRun(first, count, Strategy(tensor, len(rows), sharding=sharding, recompute=recompute), rows))
        first += count
    return tuple(found)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """Return all ways to write `total` as an ordered sum of `parts` positive integers."""
    ends = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *inner), (*inner, total), strict=True)) for inner in ends]


def fastest(problem: Problem, *, mixed: bool = False, most_pipelines: float = math.inf) -> tuple[float, Plan | None]:
    """Return the minimum iteration seconds of all plans that fit, and such a plan; infinite and None if none fits."""
    best, chosen = math.inf, None
    for plan in PlanSpace(problem, mixed).plans():
        if len(plan.pipelines) > most_pipelines:
            continue
        found = estimate_with_context(with_runtime_choices(plan, problem.cost_context), problem.cost_context)
        if found.feasible and found.iteration_seconds < best:
            best, chosen = found.iteration_seconds, plan
    return best, chosen
