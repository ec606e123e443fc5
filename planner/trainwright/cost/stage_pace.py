"""What goes in step in a stage, and how long its passes take: its replicas each by themselves, or all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from trainwright.cost.boundaries import redistribution_seconds
from trainwright.cost.collectives import ALONE, Collective, Nodes
from trainwright.cost.compute import LayerSeconds, layer_seconds
from trainwright.cost.overlap import Step, walk
from trainwright.cost.seats import Seats
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Sharding, Stage

if TYPE_CHECKING:  # the plan's paces, of which a stage's are a part
    from trainwright.cost.pace import Paces

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


@dataclass(frozen=True, slots=True)
class _Part:
    """One run of a stage, whoever goes through it.

    Attributes:
        kinds: of its layers, and how many there are of each.
        gathers: by kind of layer: seconds of collecting its sharded weights; empty where they are not sharded.
        reduces: the same of summing its gradients beside the last backward; empty where they are summed later.
    """

    run: LayerRun
    kinds: Sequence[tuple[LayerKind, int]]
    gathers: Mapping[str, float]
    reduces: Mapping[str, float]


_Seconds = dict[str, LayerSeconds]
"""By kind of layer."""


class StageBuilder:
    """Makes the pace of one stage of a plan."""

    def __init__(self, paces: Paces, stage: Stage, seats: tuple[Seats, ...]) -> None:
        self.paces, self.stage, self.seats = paces, stage, seats
        self.setting = paces.setting
        self.parts = [self._part(run, one) for run, one in zip(stage.layers, seats, strict=True)]

    def build(self) -> StagePace:
        seats = self.seats
        alike = all(seats[0].is_arranged_as(other) for other in seats[1:])
        gathers = any(part.gathers for part in self.parts)
        if not alike or gathers:
            each = [list(dict.fromkeys(self._members(one).values())) for one in (seats[:1] if alike else seats)]
            return StagePace(self.stage, seats, (self._worker(each * len(seats) if alike else each),))
        members = self._members(seats[0])
        made = {member: self._worker([[member]] * len(seats)) for member in dict.fromkeys(members.values())}
        worker_of = {replica: made[member] for replica, member in members.items()}
        return StagePace(self.stage, seats, tuple(map(worker_of.__getitem__, seats[0].rows_and_nodes)))

    def _members(self, seats: Seats) -> dict[tuple[int, Nodes], _Member]:
        """By rows and nodes of the replicas, those that are alike once."""
        accelerator_of = self.setting.accelerator_of_node
        known: dict[Nodes, tuple[tuple[str, ...], Collective]] = {}
        found: dict[tuple[int, Nodes], _Member] = {}
        for rows, nodes in dict.fromkeys(seats.rows_and_nodes):
            if nodes not in known:
                names = tuple(sorted({accelerator_of[node] for node in nodes}))
                known[nodes] = names, ALONE if seats.tensor == 1 else self.paces.tensor_collective(nodes)
            found[rows, nodes] = (rows, *known[nodes])
        return found

    def _part(self, run: LayerRun, seats: Seats) -> _Part:
        setting = self.setting
        kinds = setting.kind_counts(run.first, run.end)
        gathers: dict[str, float] = {}
        if run.sharding is Sharding.ZERO3 and run.data > 1:
            collective = setting.collectives.beside(seats.data_groups, self.paces.gather_load)
            sizes = {
                kind.name: setting.values_at(kind, run.tensor) * setting.model.dtype.num_bytes for kind, _ in kinds
            }
            gathers = {name: collective.gather_seconds(size) for name, size in sizes.items()}
        reduces: dict[str, float] = {}
        if self.paces.sums_meanwhile(run):
            collective = setting.collectives.all_reduce(seats.data_groups)
            reduces = {kind.name: self._reduce_seconds(kind, run, collective) for kind, _ in kinds}
        return _Part(run, kinds, gathers, reduces)

    def _worker(self, members: list[list[_Member]]) -> Worker:
        """The worker of these members, run by run."""
        forward_compute = forward_sync = backward_compute = backward_sync = 0.0
        taken: list[_Seconds] = []
        for part, group in zip(self.parts, members, strict=True):
            seconds = {kind.name: self._layer(kind, part.run, group) for kind, _ in part.kinds}
            taken.append(seconds)
            for kind, count in part.kinds:
                one = seconds[kind.name]
                forward_compute += count * one.forward_seconds
                forward_sync += count * one.forward_sync_seconds
                backward_compute += count * one.backward_seconds
                backward_sync += count * one.backward_sync_seconds
        moved_forward, moved_backward = self._redistribution
        forward_sharding = backward_sharding = 0.0
        if any(part.gathers for part in self.parts):
            forward_sharding = walk(list(self._forward_steps(taken)), self._slowdown)[0]
            forward_sharding -= forward_compute + forward_sync
            backward_sharding = walk(list(self._backward_steps(taken, last=False)), self._slowdown)[0]
            backward_sharding -= backward_compute + backward_sync
        forward = Pass(forward_compute, forward_sync, forward_sharding, moved_forward)
        backward = Pass(backward_compute, backward_sync, backward_sharding, moved_backward)
        last, left = backward.seconds, 0.0
        if any(part.reduces for part in self.parts):
            last, left = walk(list(self._backward_steps(taken, last=True)), self._slowdown)
            last += moved_backward
        return Worker(forward, backward, last, left)

    @property
    def _slowdown(self) -> float:
        return self.setting.runtime.overlap_slowdown_ratio

    def _layer(self, kind: LayerKind, run: LayerRun, group: list[_Member]) -> LayerSeconds:
        found = [
            layer_seconds(
                kind,
                accelerators=accelerators,
                tensor=run.tensor,
                rows=rows,
                recompute=run.recompute,
                collective=collective,
                setting=self.setting,
            )
            for rows, accelerators, collective in group
        ]
        return found[0] if len(found) == 1 else LayerSeconds.slowest(found)

    @cached_property
    def _redistribution(self) -> tuple[float, float]:
        forward = backward = 0.0
        for (run, old), (_, new) in pairwise(zip(self.stage.layers, self.seats, strict=True)):
            if not old.is_arranged_as(new):
                row_bytes = self.setting.model.output_bytes_per_row(run.end - 1)
                forward += redistribution_seconds(old, new, row_bytes, self.setting.fabric)
                backward += redistribution_seconds(new, old, row_bytes, self.setting.fabric)
        return forward, backward

    def _forward_steps(self, taken: Sequence[_Seconds]) -> Iterator[Step]:
        layers = self.setting.model.layers
        for part, seconds in zip(self.parts, taken, strict=True):
            steps = {
                name: Step(one.forward_seconds, one.forward_sync_seconds, part.gathers.get(name, 0.0))
                for name, one in seconds.items()
            }
            yield from (steps[name] for name in layers[part.run.first : part.run.end])

    def _backward_steps(self, taken: Sequence[_Seconds], *, last: bool) -> Iterator[Step]:
        layers = self.setting.model.layers
        for part, seconds in zip(reversed(self.parts), reversed(taken), strict=True):
            run, steps = part.run, {}
            for name, one in seconds.items():
                gather, reduce = part.gathers.get(name, 0.0), part.reduces.get(name, 0.0) if last else 0.0
                waits = reduce > 0 and run.sharding is not Sharding.NONE
                steps[name] = Step(one.backward_seconds, one.backward_sync_seconds, gather, reduce, waits)
            yield from (steps[name] for name in reversed(layers[run.first : run.end]))

    def _reduce_seconds(self, kind: LayerKind, run: LayerRun, collective: Collective) -> float:
        """Gradients of one layer; those of a weight with other owners too are summed with the first of them, or apart."""
        values = self.setting.values_at(kind, run.tensor)
        name = kind.shared_weight
        if name is not None and (
            name in self.paces.apart or self.setting.model.kind_of(self.setting.first_owner[name]) is not kind
        ):
            values -= self.setting.shared_at(kind, run.tensor)
        message = values * self.setting.gradient_dtype.num_bytes
        return collective.seconds(message) if run.sharding is Sharding.NONE else collective.scatter_seconds(message)
