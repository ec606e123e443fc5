"""Where pipelines of a tiny problem can lie and how they can be cut: everything but sharding and recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from trainwright.cluster import Device
from trainwright.cost.compute import layer_seconds, update_seconds
from trainwright.cost.links import node_classes
from trainwright.plan import LayerRun, Pipeline, Sharding, Stage
from trainwright.search.protocol import Problem

Places = tuple[tuple[Device, ...], ...]
"""The devices of a pipeline, stage by stage."""


@dataclass(frozen=True, slots=True)
class StageShape:
    """Devices, layers, tensor degree and rows of a stage."""

    devices: tuple[Device, ...]
    first: int
    end: int
    tensor: int
    rows: tuple[int, ...]

    def stage(self, choices: tuple[tuple[Sharding, bool], ...]) -> Stage:
        """The stage with a sharding and a recompute for every layer; like neighbours are one run."""
        runs: list[LayerRun] = []
        for place, (sharding, recompute) in enumerate(choices):
            last = runs[-1] if runs else None
            if last is not None and (last.sharding, last.recompute) == (sharding, recompute):
                runs[-1] = self._run(last.first, last.count + 1, sharding, recompute=recompute)
            else:
                runs.append(self._run(self.first + place, 1, sharding, recompute=recompute))
        return Stage(self.devices, tuple(runs))

    def _run(self, first: int, count: int, sharding: Sharding, *, recompute: bool) -> LayerRun:
        return LayerRun(first, count, self.tensor, len(self.rows), self.rows, sharding=sharding, recompute=recompute)

    @property
    def plain(self) -> Stage:
        """The stage without sharding and recompute."""
        return self.stage(((Sharding.NONE, False),) * (self.end - self.first))


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline without sharding and recompute, and what no such pipeline beats, gradients left out."""

    bound_seconds: float
    micro_batches: int
    stages: tuple[StageShape, ...]

    def pipeline(self, stages: tuple[Stage, ...]) -> Pipeline:
        return Pipeline(self.micro_batches, sum(self.stages[0].rows), stages)


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of one micro-batch, by replica of a stage, and of its optimizer at least."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update_seconds: float


@dataclass
class Shapes:
    """The shapes of one problem."""

    problem: Problem
    _pipelines: dict[tuple[Places, int], list[PipelineShape]] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], Passes] = field(default_factory=dict)
    _layers: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def arrangements(self) -> Iterator[tuple[Places, ...]]:
        """Devices of all pipelines, one of each set of arrangements that interchangeable devices make of each other."""
        most = min(self._layer_count, self.problem.limits.max_pipeline_degree or self._layer_count)
        for devices in self._orders(()):
            for cuts in product(range(3), repeat=len(devices) - 1):
                found = [[[devices[0]]]]
                for device, cut in zip(devices[1:], cuts, strict=True):
                    if cut == 0:
                        found[-1][-1].append(device)
                    elif cut == 1:
                        found[-1].append([device])
                    else:
                        found.append([[device]])
                if max(len(stages) for stages in found) <= most:
                    yield tuple(tuple(tuple(stage) for stage in stages) for stages in found)

    def _orders(self, taken: tuple[Device, ...]) -> Iterator[tuple[Device, ...]]:
        """Every order of every subset that goes on from `taken`: of equal slots and equal nodes the first free one."""
        if taken:
            yield taken
        seen = set()
        used = [device.node for device in taken]
        for node in self.problem.nodes:
            slot = used.count(node)
            kind = node if slot else self._class_of[node]
            if slot < self.problem.cluster.node(node).devices and kind not in seen:
                seen.add(kind)
                yield from self._orders((*taken, Device(node, slot)))

    @cached_property
    def _class_of(self) -> dict[str, int]:
        names = (node.name for node in self.problem.cluster.nodes)
        return dict(zip(names, node_classes(self.problem.cluster), strict=True))

    @property
    def _layer_count(self) -> int:
        return len(self.problem.model.layers)

    def pipelines(self, places: Places, rows: int) -> list[PipelineShape]:
        """All shapes of a pipeline on these devices that takes so many rows an iteration, by their bounds."""
        key = places, rows
        if key not in self._pipelines:
            found = [
                PipelineShape(self._bound(rows // size, stages), rows // size, stages)
                for size in range(1, rows + 1)
                if rows % size == 0
                for inner in combinations(range(1, self._layer_count), len(places) - 1)
                for stages in product(
                    *(
                        self._stages(devices, first, end, size)
                        for devices, first, end in zip(places, (0, *inner), (*inner, self._layer_count), strict=True)
                    )
                )
            ]
            self._pipelines[key] = sorted(found, key=lambda shape: shape.bound_seconds)
        return self._pipelines[key]

    def _stages(self, devices: tuple[Device, ...], first: int, end: int, size: int) -> list[StageShape]:
        return [
            StageShape(devices, first, end, tensor, rows)
            for tensor in range(1, len(devices) + 1)
            if len(devices) % tensor == 0 and self._may_divide(devices, tensor)
            for rows in compositions(size, len(devices) // tensor)
        ]

    def _may_divide(self, devices: tuple[Device, ...], tensor: int) -> bool:
        model, limits, setting = self.problem.model, self.problem.limits, self.problem.setting
        names = {setting.accelerator_of_node[device.node] for device in devices}
        return (
            model.max_tensor_degree % tensor == 0
            and tensor <= (limits.max_tensor_degree or tensor)
            and len(devices) // tensor <= (limits.max_data_degree or len(devices))
            and all(
                self.problem.profiles.has(name, kind.name, tensor if setting.divides(kind, tensor) else 1)
                for name in names
                for kind in model.kinds
            )
        )

    def _bound(self, micro_batches: int, stages: tuple[StageShape, ...]) -> float:
        """The first micro-batch down to a stage, all of them there, the last one's backward up, and the optimizer."""
        passes = [self.passes(stage) for stage in stages]
        forward = [min(one.forward) for one in passes]
        backward = [min(one.backward) for one in passes]
        best = 0.0
        for number, one in enumerate(passes):
            ahead = min(micro_batches, len(stages) - number)
            above, below = sum(forward[:number]), sum(forward[number + 1 :]) + sum(backward[number + 1 :])
            busy = max(
                micro_batches * (f + b) + max(below - (ahead - 1) * f, 0.0)
                for f, b in zip(one.forward, one.backward, strict=True)
            )
            behind = max(one.update_seconds, sum(backward[:number]) + passes[0].update_seconds if number else 0.0)
            best = max(best, above + busy + behind)
        return best

    def passes(self, stage: StageShape) -> Passes:
        """Of a stage without sharding and recompute; its optimizer as if all were sharded."""
        nodes = tuple(device.node for device in stage.devices)
        key = (nodes, stage.first, stage.end, stage.tensor, stage.rows)
        if key not in self._passes:
            size = stage.tensor
            replicas = [nodes[i * size : (i + 1) * size] for i in range(len(stage.rows))]
            each = [
                [self.layer(layer, members, rows) for layer in range(stage.first, stage.end)]
                for members, rows in zip(replicas, stage.rows, strict=True)
            ]
            self._passes[key] = Passes(
                tuple(sum(one[0] for one in replica) for replica in each),
                tuple(sum(one[1] for one in replica) for replica in each),
                sum(self.update(layer, stage) for layer in range(stage.first, stage.end)) / len(stage.rows),
            )
        return self._passes[key]

    def layer(self, layer: int, members: tuple[str, ...], rows: int) -> tuple[float, float]:
        """Forward and backward of a layer on one tensor group, whose all-reduces are alone on the network."""
        setting = self.problem.setting
        kind = self.problem.model.kind_of(layer)
        key = (kind.name, members, rows)
        if key not in self._layers:
            one = layer_seconds(
                kind,
                accelerators=tuple(sorted({setting.accelerator_of_node[node] for node in members})),
                tensor=len(members),
                rows=rows,
                recompute=False,
                collective=setting.collectives.all_reduce((members,)),
                setting=setting,
            )
            self._layers[key] = (
                one.forward_seconds + one.forward_sync_seconds,
                one.backward_seconds + one.backward_sync_seconds,
            )
        return self._layers[key]

    def update(self, layer: int, stage: StageShape) -> float:
        """Least seconds of the optimizer for a layer that is not sharded, on any device of the stage.

        0 where the model shares weights: owners in one run update them once.
        """
        setting = self.problem.setting
        if any(kind.shared_weight is not None for kind in self.problem.model.kinds):
            return 0.0
        names = {setting.accelerator_of_node[device.node] for device in stage.devices}
        run = LayerRun(layer, 1, stage.tensor, len(stage.rows), stage.rows)
        return min(update_seconds(name, run, setting)[0] for name in names)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of so many numbers of at least 1."""
    if total < parts:
        return []
    ends = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *inner), (*inner, total), strict=True)) for inner in ends]
