"""Shapes of a tiny problem's pipelines, before sharding and recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from trainwright.cluster import Device
from trainwright.cost.network import node_classes
from trainwright.cost.time_terms import TensorGroupClass, layer_terms, update_seconds
from trainwright.plan import LayerRun, Pipeline, Sharding, Stage
from trainwright.search.problem import Problem

StageDevices = tuple[tuple[Device, ...], ...]
"""Devices by stage of a pipeline."""


@dataclass(frozen=True, slots=True)
class StageShape:
    """Devices, layers, tensor degree and rows of a stage."""

    devices: tuple[Device, ...]
    first: int
    end: int
    tensor: int
    rows: tuple[int, ...]

    def to_stage(self, choices: tuple[tuple[Sharding, bool], ...]) -> Stage:
        """Build the stage from each layer's sharding and recompute, merging equal neighbours into runs."""
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
    def without_savings(self) -> Stage:
        """Return the stage without sharding and recompute."""
        return self.to_stage(((Sharding.NONE, False),) * (self.end - self.first))


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Pipeline before sharding and recompute, with a lower bound on seconds that ignores gradients."""

    bound_seconds: float
    micro_batches: int
    stages: tuple[StageShape, ...]

    def to_pipeline(self, stages: tuple[Stage, ...]) -> Pipeline:
        return Pipeline(self.micro_batches, sum(self.stages[0].rows), stages)


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Micro-batch seconds by replica, and a lower bound on optimizer seconds."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update_seconds: float


@dataclass
class ShapeSpace:
    """Space of shapes of one problem."""

    problem: Problem
    _shapes_by_devices: dict[tuple[StageDevices, int], list[PipelineShape]] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], PassSeconds] = field(default_factory=dict)
    _layers: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def arrangements(self) -> Iterator[tuple[StageDevices, ...]]:
        """Yield devices by pipeline and stage, one arrangement per set of interchangeable ones."""
        most = min(self._layer_count, self.problem.limits.max_pipeline_degree or self._layer_count)
        for devices in self._orders(()):
            for separators in product(range(3), repeat=len(devices) - 1):
                found = [[[devices[0]]]]
                for device, cut in zip(devices[1:], separators, strict=True):
                    if cut == 0:
                        found[-1][-1].append(device)
                    elif cut == 1:
                        found[-1].append([device])
                    else:
                        found.append([[device]])
                if max(len(stages) for stages in found) <= most:
                    yield tuple(tuple(tuple(stage) for stage in stages) for stages in found)

    def _orders(self, taken: tuple[Device, ...]) -> Iterator[tuple[Device, ...]]:
        """Yield every order of every device subset that starts with `taken`, up to interchangeable devices."""
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

    def pipeline_shapes(self, stage_devices: StageDevices, rows: int) -> list[PipelineShape]:
        """Return all shapes on these devices with `rows` per iteration, lowest bound first."""
        key = stage_devices, rows
        if key not in self._shapes_by_devices:
            found = [
                PipelineShape(self._bound_seconds(rows // size, stages), rows // size, stages)
                for size in range(1, rows + 1)
                if rows % size == 0
                for inner in combinations(range(1, self._layer_count), len(stage_devices) - 1)
                for stages in product(
                    *(
                        self._stage_shapes(devices, first, end, size)
                        for devices, first, end in zip(
                            stage_devices, (0, *inner), (*inner, self._layer_count), strict=True
                        )
                    )
                )
            ]
            self._shapes_by_devices[key] = sorted(found, key=lambda shape: shape.bound_seconds)
        return self._shapes_by_devices[key]

    def _stage_shapes(self, devices: tuple[Device, ...], first: int, end: int, size: int) -> list[StageShape]:
        return [
            StageShape(devices, first, end, tensor, rows)
            for tensor in range(1, len(devices) + 1)
            if len(devices) % tensor == 0 and self._allows_degree(devices, tensor)
            for rows in compositions(size, len(devices) // tensor)
        ]

    def _allows_degree(self, devices: tuple[Device, ...], tensor: int) -> bool:
        model, limits, context = self.problem.model, self.problem.limits, self.problem.cost_context
        names = {context.accelerator_of_node[device.node] for device in devices}
        return (
            model.max_tensor_degree % tensor == 0
            and tensor <= (limits.max_tensor_degree or tensor)
            and len(devices) // tensor <= (limits.max_data_degree or len(devices))
            and all(
                self.problem.profiles.has(name, kind.name, tensor if context.is_tensor_sharded(kind, tensor) else 1)
                for name in names
                for kind in model.kinds
            )
        )

    def _bound_seconds(self, micro_batches: int, stages: tuple[StageShape, ...]) -> float:
        """Return a lower bound: first micro-batch to a stage, all of them there, last backward up, and optimizer.

        Of interleaved stages, which wait less, it counts the work.
        """
        passes = [self.pass_seconds(stage) for stage in stages]
        if self.problem.runtime.chunks_of(micro_batches, [stage.end - stage.first for stage in stages]) > 1:
            return max(
                micro_batches * (f + b) + one.update_seconds
                for one in passes
                for f, b in zip(one.forward, one.backward, strict=True)
            )
        forward = [min(one.forward) for one in passes]
        backward = [min(one.backward) for one in passes]
        best = 0.0
        for number, one in enumerate(passes):
            warm_up = min(micro_batches, len(stages) - number)
            earlier_forwards, round_trip_after = (
                sum(forward[:number]),
                sum(forward[number + 1 :]) + sum(backward[number + 1 :]),
            )
            busy = max(
                micro_batches * (f + b) + max(round_trip_after - (warm_up - 1) * f, 0.0)
                for f, b in zip(one.forward, one.backward, strict=True)
            )
            tail = max(one.update_seconds, sum(backward[:number]) + passes[0].update_seconds if number else 0.0)
            best = max(best, earlier_forwards + busy + tail)
        return best

    def pass_seconds(self, stage: StageShape) -> PassSeconds:
        """Return pass seconds without sharding and recompute; optimizer seconds as if fully sharded."""
        nodes = tuple(device.node for device in stage.devices)
        key = (nodes, stage.first, stage.end, stage.tensor, stage.rows)
        if key not in self._passes:
            size = stage.tensor
            replicas = [nodes[i * size : (i + 1) * size] for i in range(len(stage.rows))]
            each = [
                [self.layer_pass_seconds(layer, members, rows) for layer in range(stage.first, stage.end)]
                for members, rows in zip(replicas, stage.rows, strict=True)
            ]
            self._passes[key] = PassSeconds(
                tuple(sum(one[0] for one in replica) for replica in each),
                tuple(sum(one[1] for one in replica) for replica in each),
                sum(self.update_seconds(layer, stage) for layer in range(stage.first, stage.end)) / len(stage.rows),
            )
        return self._passes[key]

    def layer_pass_seconds(self, layer: int, members: tuple[str, ...], rows: int) -> tuple[float, float]:
        """Return a layer's forward and backward seconds on one tensor group without network contention."""
        context = self.problem.cost_context
        kind = self.problem.model.kind_of(layer)
        key = (kind.name, members, rows)
        if key not in self._layers:
            accelerators = tuple(sorted({context.accelerator_of_node[node] for node in members}))
            group = TensorGroupClass(accelerators, len(members), context.collectives.all_reduce((members,)))
            divides = context.sequence_parallelism.chosen_for(kind, group.tensor)
            terms = layer_terms(kind, group, rows, context, sequence_parallel=divides)
            self._layers[key] = terms.forward_pass_seconds, terms.backward_pass_seconds
        return self._layers[key]

    def update_seconds(self, layer: int, stage: StageShape) -> float:
        """Return minimum optimizer seconds of an unsharded layer over the stage's devices.

        It is 0 if the model ties weights, because owners in one run update them once.
        """
        context = self.problem.cost_context
        if any(kind.shared_weight is not None for kind in self.problem.model.kinds):
            return 0.0
        names = {context.accelerator_of_node[device.node] for device in stage.devices}
        run = LayerRun(layer, 1, stage.tensor, len(stage.rows), stage.rows)
        return min(update_seconds(name, run, context)[0] for name in names)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """Return all ordered sums of `parts` positive integers that equal `total`."""
    if total < parts:
        return []
    ends = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *inner), (*inner, total), strict=True)) for inner in ends]
