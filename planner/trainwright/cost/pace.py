"""How long the passes of a stage take: its replicas each by themselves, or all of them in step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from trainwright.cost.boundaries import redistribution_seconds
from trainwright.cost.collectives import ALONE, Collective, Nodes, RingLoad
from trainwright.cost.compute import LayerSeconds, layer_seconds
from trainwright.cost.overlap import Step, walk
from trainwright.cost.seats import Seats
from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Plan, Sharding, Stage

StageKey = tuple[int, int]
"""(pipeline, stage)."""
_Member = tuple[int, tuple[str, ...], Collective]
"""What decides a replica's pace: its rows, its accelerators, the all-reduce of its tensor group."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one forward, or one backward, of a micro-batch.

    Attributes:
        sync_seconds: tensor all-reduces.
        sharding_seconds: collecting sharded weights, as far as computation does not hide it, and the slow-down of
            what hides it.
        redistribution_seconds: moving rows between layers that are arranged differently.
    """

    compute_seconds: float
    sync_seconds: float = 0.0
    sharding_seconds: float = 0.0
    redistribution_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.sync_seconds + self.sharding_seconds + self.redistribution_seconds


@dataclass(frozen=True, slots=True)
class Worker:
    """What goes in step: a replica, or a whole stage.

    Attributes:
        last_backward_seconds: of the last micro-batch, where gradients are summed meanwhile.
        left_seconds: what is left of those sums when it ends.
    """

    forward: Pass
    backward: Pass
    last_backward_seconds: float
    left_seconds: float = 0.0


@dataclass(frozen=True)
class StagePace:
    """A stage's workers. In step they are one; otherwise there is one for each replica."""

    stage: Stage
    seats: tuple[Seats, ...]
    workers: tuple[Worker, ...]

    def worker_of(self, replica: int) -> int:
        return 0 if len(self.workers) == 1 else replica


@dataclass(frozen=True)
class Paces:
    """The paces of all stages of a plan."""

    plan: Plan
    setting: Setting

    @cached_property
    def seats(self) -> dict[StageKey, tuple[Seats, ...]]:
        """By stage: how each of its runs arranges its ranks."""
        return {
            (index, number): tuple(Seats.of(stage, run) for run in stage.layers)
            for index, pipeline in enumerate(self.plan.pipelines)
            for number, stage in enumerate(pipeline.stages)
        }

    @cached_property
    def stages(self) -> dict[StageKey, StagePace]:
        return {
            key: _StageBuilder(self, self.plan.pipelines[key[0]].stages[key[1]], seats).build()
            for key, seats in self.seats.items()
        }

    @cached_property
    def apart(self) -> dict[str, tuple[StageKey, ...]]:
        """Weights whose owners sit in several stages of a pipeline, and those stages: their gradients are summed apart."""
        owners: dict[str, dict[StageKey, None]] = {}
        for index, pipeline in enumerate(self.plan.pipelines):
            for number, stage in enumerate(pipeline.stages):
                for kind, _ in self.setting.kind_counts(stage.first, stage.end):
                    if kind.shared_weight is not None:
                        owners.setdefault(kind.shared_weight, {})[index, number] = None
        return {name: tuple(keys) for name, keys in owners.items() if len(keys) > len(self.plan.pipelines)}

    @cached_property
    def tensor_load(self) -> RingLoad:
        """How often tensor rings use every card; in a full pipeline they all run at about the same time."""
        return self._load({key: [seats.replicas for seats in stage] for key, stage in self.seats.items()})

    @cached_property
    def gather_load(self) -> RingLoad:
        """The same of the rings that collect sharded weights."""
        groups = {}
        for key, stage in self.seats.items():
            runs = self.plan.pipelines[key[0]].stages[key[1]].layers
            groups[key] = [s.data_groups for s, run in zip(stage, runs, strict=True) if run.sharding is Sharding.ZERO3]
        return self._load(groups)

    def _load(self, groups: dict[StageKey, list[tuple[Nodes, ...]]]) -> RingLoad:
        """Runs of a stage take turns, stages do not."""
        total = RingLoad()
        for runs in groups.values():
            stage = RingLoad()
            for arrangement in dict.fromkeys(runs):
                if len(arrangement[0]) > 1:
                    crossing = [nodes for nodes in arrangement if len(set(nodes)) > 1]
                    stage |= self.setting.collectives.ring_load(crossing)
            total += stage
        return total

    def tensor_collective(self, nodes: Nodes) -> Collective:
        """The all-reduce of one tensor group."""
        if len(set(nodes)) == 1:
            return self.setting.collectives.all_reduce((nodes,))
        return self.setting.collectives.beside((nodes,), self.tensor_load)

    @cached_property
    def unlike_layers(self) -> frozenset[int]:
        """Layers whose weights not all pipelines divide in the same way, by tensor degree and among replicas."""
        ways: dict[int, set[tuple[int, int, bool]]] = {}
        if len(self.plan.pipelines) > 1:
            for pipeline in self.plan.pipelines:
                for run in (run for stage in pipeline.stages for run in stage.layers):
                    way = run.tensor, run.data, run.sharding is Sharding.NONE
                    for layer in range(run.first, run.first + run.count):
                        ways.setdefault(layer, set()).add(way)
        return frozenset(layer for layer, found in ways.items() if len(found) > 1)

    def sums_meanwhile(self, run: LayerRun) -> bool:
        """Whether the run's gradients are summed while the last backward still runs.

        With several pipelines, those that are not sharded are summed over pipelines that end at different times, and
        so after the last backward; and so are those that pipelines divide in different ways.
        """
        if run.data == 1 or not self.unlike_layers.isdisjoint(range(run.first, run.first + run.count)):
            return False
        if run.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
            return True
        alone = len(self.plan.pipelines) == 1
        return self.setting.runtime.overlaps_gradients and (alone or run.sharding is Sharding.ZERO1)


@dataclass(frozen=True, slots=True)
class _Part:
    """One run of a stage as a worker goes through it.

    Attributes:
        kinds: of its layers, and how many there are of each.
        seconds: by kind of layer.
        gathers: by kind of layer: seconds of collecting its sharded weights; empty where they are not sharded.
    """

    run: LayerRun
    seats: Seats
    kinds: Sequence[tuple[LayerKind, int]]
    seconds: Mapping[str, LayerSeconds]
    gathers: Mapping[str, float]


class _StageBuilder:
    def __init__(self, paces: Paces, stage: Stage, seats: tuple[Seats, ...]) -> None:
        self.paces, self.stage, self.seats = paces, stage, seats
        self.setting = paces.setting

    def build(self) -> StagePace:
        seats = self.seats
        alike = all(seats[0].is_arranged_as(other) for other in seats[1:])
        gathers = any(run.sharding is Sharding.ZERO3 and run.data > 1 for run in self.stage.layers)
        members = [self._members(one) for one in (seats[:1] if alike else seats)]
        if not alike or gathers:
            each = [list(dict.fromkeys(found)) for found in members]
            return StagePace(self.stage, seats, (self._worker(each * len(seats) if alike else each),))
        made = {member: self._worker([[member]] * len(seats)) for member in dict.fromkeys(members[0])}
        return StagePace(self.stage, seats, tuple(made[member] for member in members[0]))

    def _members(self, seats: Seats) -> list[_Member]:
        """By data replica."""
        accelerator_of = self.setting.accelerator_of_node
        if seats.tensor == 1:
            return [(rows, (accelerator_of[n],), ALONE) for rows, (n,) in zip(seats.rows, seats.replicas, strict=True)]
        found: dict[Nodes, tuple[tuple[str, ...], Collective]] = {}
        for nodes in seats.replicas:
            if nodes not in found:
                names = tuple(sorted({accelerator_of[node] for node in nodes}))
                found[nodes] = names, self.paces.tensor_collective(nodes)
        return [(rows, *found[nodes]) for rows, nodes in zip(seats.rows, seats.replicas, strict=True)]

    def _worker(self, members: list[list[_Member]]) -> Worker:
        """The worker of these members, run by run."""
        runs = self.stage.layers
        parts = [self._part(run, seats, group) for run, seats, group in zip(runs, self.seats, members, strict=True)]
        forward_compute = forward_sync = backward_compute = backward_sync = 0.0
        for part in parts:
            for kind, count in part.kinds:
                one = part.seconds[kind.name]
                forward_compute += count * one.forward_seconds
                forward_sync += count * one.forward_sync_seconds
                backward_compute += count * one.backward_seconds
                backward_sync += count * one.backward_sync_seconds
        moved_forward, moved_backward = self._redistribution()
        forward_sharding = backward_sharding = 0.0
        if any(part.gathers for part in parts):
            forward_sharding = walk(list(self._forward_steps(parts)), self._slowdown)[0]
            forward_sharding -= forward_compute + forward_sync
            backward_sharding = walk(list(self._backward_steps(parts, last=False)), self._slowdown)[0]
            backward_sharding -= backward_compute + backward_sync
        forward = Pass(forward_compute, forward_sync, forward_sharding, moved_forward)
        backward = Pass(backward_compute, backward_sync, backward_sharding, moved_backward)
        last, left = backward.seconds, 0.0
        if any(self.paces.sums_meanwhile(run) for run in runs):
            last, left = walk(list(self._backward_steps(parts, last=True)), self._slowdown)
            last += moved_backward
        return Worker(forward, backward, last, left)

    def _part(self, run: LayerRun, seats: Seats, group: list[_Member]) -> _Part:
        kinds = self.setting.kind_counts(run.first, run.first + run.count)
        gathers: dict[str, float] = {}
        if run.sharding is Sharding.ZERO3 and run.data > 1:
            collective = self.setting.collectives.beside(seats.data_groups, self.paces.gather_load)
            size = self.setting.model.dtype.num_bytes
            for kind, _ in kinds:
                gathers[kind.name] = collective.gather_seconds(self.setting.values_at(kind, run.tensor) * size)
        return _Part(run, seats, kinds, {kind.name: self._layer(kind, run, group) for kind, _ in kinds}, gathers)

    @property
    def _slowdown(self) -> float:
        return self.setting.runtime.overlap_slowdown_ratio

    def _layer(self, kind: LayerKind, run: LayerRun, group: list[_Member]) -> LayerSeconds:
        found = [self._one(kind, run, member) for member in group]
        return found[0] if len(found) == 1 else LayerSeconds.slowest(found)

    def _one(self, kind: LayerKind, run: LayerRun, member: _Member) -> LayerSeconds:
        rows, accelerators, collective = member
        return layer_seconds(
            kind,
            accelerators=accelerators,
            tensor=run.tensor,
            rows=rows,
            recompute=run.recompute,
            collective=collective,
            setting=self.setting,
        )

    def _redistribution(self) -> tuple[float, float]:
        forward = backward = 0.0
        for (run, old), (_, new) in pairwise(zip(self.stage.layers, self.seats, strict=True)):
            if not old.is_arranged_as(new):
                row_bytes = self.setting.model.output_bytes_per_row(run.first + run.count - 1)
                forward += redistribution_seconds(old, new, row_bytes, self.setting.fabric)
                backward += redistribution_seconds(new, old, row_bytes, self.setting.fabric)
        return forward, backward

    def _forward_steps(self, parts: Sequence[_Part]) -> Iterator[Step]:
        layers = self.setting.model.layers
        for part in parts:
            run, steps = part.run, {}
            for name, one in part.seconds.items():
                steps[name] = Step(one.forward_seconds, one.forward_sync_seconds, part.gathers.get(name, 0.0))
            yield from (steps[name] for name in layers[run.first : run.first + run.count])

    def _backward_steps(self, parts: Sequence[_Part], *, last: bool) -> Iterator[Step]:
        layers = self.setting.model.layers
        for part in reversed(parts):
            run, steps = part.run, {}
            meanwhile = last and self.paces.sums_meanwhile(run)
            for kind, _ in part.kinds:
                one, gather = part.seconds[kind.name], part.gathers.get(kind.name, 0.0)
                reduce = self._reduce_seconds(kind, run, part.seats) if meanwhile else 0.0
                waits = reduce > 0 and run.sharding is not Sharding.NONE
                steps[kind.name] = Step(one.backward_seconds, one.backward_sync_seconds, gather, reduce, waits)
            yield from (steps[name] for name in reversed(layers[run.first : run.first + run.count]))

    def _reduce_seconds(self, kind: LayerKind, run: LayerRun, seats: Seats) -> float:
        """Gradients of one layer; those of a weight with other owners too are summed with the first of them, or apart."""
        values = self.setting.values_at(kind, run.tensor)
        name = kind.shared_weight
        if name is not None and (
            name in self.paces.apart or self.setting.model.kind_of(self.setting.first_owner[name]) is not kind
        ):
            values -= self.setting.shared_at(kind, run.tensor)
        collective = self.setting.collectives.all_reduce(seats.data_groups)
        message = values * self.setting.gradient_dtype.num_bytes
        return collective.seconds(message) if run.sharding is Sharding.NONE else collective.scatter_seconds(message)
