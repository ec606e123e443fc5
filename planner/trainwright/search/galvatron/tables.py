"""Seconds and bytes of every layer class under every strategy, on the devices of one stage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import memory
from trainwright.cost.galvatron_layers import GroupCosts, layout_of
from trainwright.cost.galvatron_memory import layer_bytes
from trainwright.cost.seats import Seats
from trainwright.plan import LayerRun, Stage
from trainwright.search.galvatron.sequence import LayerClass, Sequence
from trainwright.search.galvatron.stage_programme import StageChoices
from trainwright.search.galvatron.strategies import Strategy, strategies
from trainwright.search.protocol import Problem

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ClassBytes:
    """[class, strategy] bytes of one layer; see LayerBytes."""

    kept: Array
    state: Array
    recomputed: Array
    gathered: Array


@dataclass
class GroupTables:
    """Tables for the devices of a stage and a micro-batch size (B_m).

    Attributes:
        runs: one layer under every strategy that is open here.
    """

    problem: Problem
    sequence: Sequence
    costs: GroupCosts
    micro_batch_size: int
    runs: tuple[LayerRun, ...] = field(init=False)

    def __post_init__(self) -> None:
        open_here = [s for s in strategies(len(self.costs.devices)) if self._is_open(s)]
        self.runs = tuple(strategy.layer_run(0, 1, self.micro_batch_size) for strategy in open_here)

    def _is_open(self, strategy: Strategy) -> bool:
        limits, model, profiles = self.problem.limits, self.problem.model, self.problem.profiles
        return (
            strategy.data <= min(self.micro_batch_size, limits.max_data_degree or strategy.data)
            and strategy.tensor <= (limits.max_tensor_degree or strategy.tensor)
            and model.max_tensor_degree % strategy.tensor == 0
            and all(
                (strategy.tensor if kind.is_tensor_parallel else 1) in profiles.tensor_degrees(accelerator, kind.name)
                for kind in model.kinds
                for accelerator in dict.fromkeys(self.costs.accelerators)
            )
        )

    @cached_property
    def budget_bytes(self) -> float:
        """E: what the smallest device offers."""
        cluster = self.problem.setting.cluster
        sizes = [cluster.accelerator_of(device).memory_bytes for device in self.costs.devices]
        return min(sizes) - self.problem.runtime.constant_bytes

    def layer_runs(self, first: int, chosen: tuple[int, ...]) -> tuple[LayerRun, ...]:
        """The layers from `first` on by their strategies; neighbouring layers with one strategy become one run."""
        starts = [0, *(i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]), len(chosen)]
        spans = pairwise(starts)
        return tuple(replace(self.runs[chosen[a]], first=first + a, count=b - a) for a, b in spans)

    @cached_property
    def layouts(self) -> Indices:
        """[strategy] number of its layout."""
        numbers: dict[object, int] = {}
        return np.array([numbers.setdefault(layout_of(run), len(numbers)) for run in self.runs], dtype=np.int64)

    @cached_property
    def layout_runs(self) -> tuple[LayerRun, ...]:
        """One strategy of every layout."""
        firsts = np.unique(self.layouts, return_index=True)[1]
        return tuple(self.runs[int(first)] for first in firsts)

    @cached_property
    def rows(self) -> Array:
        """[layout] rows of the device that computes most."""
        return np.array([max(run.rows) for run in self.layout_runs], dtype=float)

    @cached_property
    def seconds(self) -> tuple[Array, Array]:
        """[class, strategy] c(l, s) of a steady and of the last micro-batch."""
        found = [[self.costs.seconds(layer.kind, run) for run in self.runs] for layer in self.sequence.classes]
        steady = np.array([[cost.steady_seconds for cost in row] for row in found])
        return steady, np.array([[cost.last_seconds for cost in row] for row in found])

    @cached_property
    def moves(self) -> Array:
        """[class, layout, layout] R on entering a layer of the class."""
        pairs = [[self.costs.transformation(a, b) for b in self.layout_runs] for a in self.layout_runs]
        latency, per_byte = np.moveaxis(np.array(pairs), 2, 0)
        sizes = np.array([layer.input_bytes_per_row for layer in self.sequence.classes], dtype=float)
        moved: Array = latency[None] + sizes[:, None, None] * per_byte[None]
        return moved

    @property
    def micro_batches(self) -> int:
        """M."""
        return self.problem.global_batch_size // self.micro_batch_size

    @cached_property
    def bytes(self) -> ClassBytes:
        """Bytes on the accelerator that holds most."""
        found = np.array([[self._bytes(layer, run) for run in self.runs] for layer in self.sequence.classes])
        return ClassBytes(*np.moveaxis(found, 2, 0))

    def _bytes(self, layer: LayerClass, run: LayerRun) -> tuple[float, float, float, float]:
        most = (0.0, 0.0, 0.0, 0.0)
        for accelerator in dict.fromkeys(self.costs.accelerators):
            held = layer_bytes(
                layer.kind,
                run,
                accelerator,
                self.problem.setting,
                input_bytes_per_row=layer.input_bytes_per_row,
                parameters=layer.parameters_at(run.tensor, self.problem.setting),
                micro_batches=self.micro_batches,
            )
            state = held.state_bytes
            if layer.is_last:
                state += memory.loss_bytes(self.problem.setting, run.tensor, max(run.rows))
            most = max(most, (held.kept_bytes, state, held.recomputed_bytes, held.gathered_bytes), key=sum)
        return most


@dataclass
class StageTable:
    """A group's tables at a place of the pipeline, where `in_flight` micro-batches are kept at once (1F1B)."""

    group: GroupTables
    in_flight: int

    @cached_property
    def forward_bytes(self) -> Array:
        """[class, strategy] O_f + O_ms."""
        held = self.group.bytes
        return self.in_flight * held.kept + held.state

    @cached_property
    def peak_bytes(self) -> Array:
        """[class, strategy] O_b, if the layer ahead gathers as much."""
        held = self.group.bytes
        return held.recomputed + memory.GATHERED_AT_ONCE * held.gathered

    @cached_property
    def entering_bytes(self) -> Array:
        """[class, layout] messages on their way into a stage that begins with the class."""
        sizes = np.array([layer.input_bytes_per_row for layer in self.group.sequence.classes], dtype=float)
        return memory.RECEIVED_AHEAD * sizes[:, None] * self.group.rows[None, :]

    @cached_property
    def leaving_bytes(self) -> Array:
        """[class, layout] messages on their way out of a stage that ends with the class, and outputs kept."""
        sizes = np.array([layer.output_bytes_per_row for layer in self.group.sequence.classes], dtype=float)
        return (self.in_flight + memory.RECEIVED_AHEAD) * sizes[:, None] * self.group.rows[None, :]

    def choices(
        self, first: int, end: int, steady_weight: float, budget_bytes: float, *, gathered_bytes: float | None = None
    ) -> StageChoices:
        """The programme of a stage with these layers, which minimises last + weight × steady seconds.

        O_b stays to the end: activations of the micro-batches behind are still there, and weights are gathered ahead.
        With a limit of what a layer gathers, that much is set aside and strategies that gather more are closed.
        """
        group = self.group
        members = np.array(group.sequence.members(first, end))
        steady, last = group.seconds
        forward, gathered = self.forward_bytes[members], group.bytes.gathered[members]
        forward[0] += self.entering_bytes[members[0]][group.layouts]
        forward[-1] += self.leaving_bytes[members[-1]][group.layouts]
        seconds, peak = (last + steady_weight * steady)[members], group.bytes.recomputed[members]
        if gathered_bytes is None:
            peak = peak + gathered + np.roll(gathered, 1, axis=0) * (gathered > 0)
        else:
            seconds = np.where(gathered <= gathered_bytes, seconds, np.inf)
        return StageChoices(
            seconds=seconds,
            moved_seconds=(1 + steady_weight) * group.moves[members],
            layouts=group.layouts,
            forward_bytes=forward,
            peak_bytes=peak,
            released_bytes=np.zeros_like(forward),
            budget_bytes=budget_bytes - (gathered_bytes or 0.0),
        )

    def gathered_limits(self, first: int, end: int) -> list[float]:
        """What a layer may gather at most: nothing, or what some layer and strategy need."""
        gathered = self.group.bytes.gathered[np.array(self.group.sequence.members(first, end))]
        return [float(size) for size in np.unique(np.append(gathered, 0.0))]

    def seconds(self, first: int, end: int, path: tuple[int, ...]) -> tuple[float, float]:
        """Steady and last seconds of an assignment."""
        group = self.group
        members = np.array(group.sequence.members(first, end))
        steady, last = group.seconds
        chosen = np.array(path)
        layouts = group.layouts[chosen]
        moved = float(group.moves[members[1:], layouts[:-1], layouts[1:]].sum())
        return float(steady[members, chosen].sum()) + moved, float(last[members, chosen].sum()) + moved

    def exact_bytes(self, first: int, path: tuple[int, ...]) -> tuple[float, float]:
        """What the fullest device holds by the exact memory model, and what the shortest one lacks (<= 0: nothing)."""
        group = self.group
        stage = Stage(group.costs.devices, group.layer_runs(first, path))
        parts = memory.stage_memory(
            stage,
            tuple(Seats.of(stage, run) for run in stage.layers),
            group.problem.setting,
            kept=self.in_flight,
            micro_batches=group.micro_batches,
        )
        sizes = group.problem.setting.memory_of_node
        held = [part.total_bytes for part in parts]
        lacks = [size - sizes[device.node] for size, device in zip(held, stage.devices, strict=True)]
        return float(max(held)), float(max(lacks))
