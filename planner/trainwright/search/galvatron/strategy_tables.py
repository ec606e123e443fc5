"""Seconds and bytes of every layer class under every strategy, on the devices of one stage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import memory
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import boundary_buffer_bytes
from trainwright.plan import LayerRun, Stage, split_rows
from trainwright.rank_layout import node_layouts
from trainwright.search.degrees import is_open
from trainwright.search.galvatron.galvatron_model import StageGroupCosts, layer_bytes, layout_of
from trainwright.search.galvatron.layer_classes import LayerClass, LayerSequence, strategies
from trainwright.search.galvatron.strategy_dp import StageChoices
from trainwright.search.plan_defaults import run_with_runtime_choices
from trainwright.search.problem import Problem

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ClassBytes:
    """Bytes of one layer, `[class, strategy]`, as in `LayerBytes`."""

    stored: Array
    state: Array
    recomputed: Array
    gathered: Array


@dataclass
class GroupTables:
    """Cost tables of a stage's devices at one micro-batch size (B_m).

    Attributes:
        runs: a single layer under each allowed strategy.
    """

    problem: Problem
    sequence: LayerSequence
    costs: StageGroupCosts
    micro_batch_size: int
    runs: tuple[LayerRun, ...] = field(init=False)

    def __post_init__(self) -> None:
        accelerators = tuple(dict.fromkeys(self.costs.accelerators))
        open_here = [
            strategy
            for strategy in strategies(len(self.costs.devices))
            if strategy.data <= self.micro_batch_size and is_open(self.problem, strategy, accelerators)
        ]
        runs = (LayerRun(0, 1, strategy, split_rows(self.micro_batch_size, strategy.data)) for strategy in open_here)
        self.runs = tuple(run_with_runtime_choices(run, self.problem.cost_context) for run in runs)

    @cached_property
    def budget_bytes(self) -> float:
        """Return E, the memory of the smallest device after the runtime's constant part."""
        cluster, runtime = self.problem.cost_context.cluster, self.problem.runtime
        accelerators = {cluster.accelerator_of(device) for device in self.costs.devices}
        return min(
            accelerator.memory_bytes - runtime.constant_bytes_of(accelerator.name) for accelerator in accelerators
        )

    def layer_runs(self, first: int, chosen: tuple[int, ...]) -> tuple[LayerRun, ...]:
        """Return the layers from `first` on with their strategies, merging adjacent layers of equal strategies."""
        starts = [0, *(i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]), len(chosen)]
        spans = pairwise(starts)
        return tuple(replace(self.runs[chosen[a]], first=first + a, count=b - a) for a, b in spans)

    @cached_property
    def layouts(self) -> Indices:
        """Return `[strategy]` its layout number."""
        numbers: dict[object, int] = {}
        return np.array([numbers.setdefault(layout_of(run), len(numbers)) for run in self.runs], dtype=np.int64)

    @cached_property
    def layout_runs(self) -> tuple[LayerRun, ...]:
        """Return one strategy of every layout."""
        firsts = np.unique(self.layouts, return_index=True)[1]
        return tuple(self.runs[int(first)] for first in firsts)

    @cached_property
    def rows(self) -> Array:
        """Return `[layout]` rows of the device with the most."""
        return np.array([max(run.rows) for run in self.layout_runs], dtype=float)

    @cached_property
    def seconds(self) -> tuple[Array, Array]:
        """Return `[class, strategy]` c(l, s) of a steady and of the last micro-batch."""
        costs = [[self.costs.seconds(layer.kind, run) for run in self.runs] for layer in self.sequence.classes]
        steady = np.array([[cost.micro_batch_seconds for cost in row] for row in costs])
        return steady, np.array([[cost.last_micro_batch_seconds for cost in row] for row in costs])

    @cached_property
    def transformation_seconds(self) -> Array:
        """Return `[class, layout, layout]` R on entering a layer of the class."""
        pairs = [[self.costs.transformation_alpha_beta(a, b) for b in self.layout_runs] for a in self.layout_runs]
        latency, per_byte = np.moveaxis(np.array(pairs), 2, 0)
        sizes = np.array([layer.input_bytes_per_row for layer in self.sequence.classes], dtype=float)
        moved: Array = latency[None] + sizes[:, None, None] * per_byte[None]
        return moved

    @property
    def micro_batches(self) -> int:
        """Return m."""
        return self.problem.global_batch_size // self.micro_batch_size

    @cached_property
    def bytes(self) -> ClassBytes:
        """Return bytes on the accelerator that needs the most."""
        bytes_of_classes = np.array([[self._bytes(layer, run) for run in self.runs] for layer in self.sequence.classes])
        return ClassBytes(*np.moveaxis(bytes_of_classes, 2, 0))

    def _bytes(self, layer: LayerClass, run: LayerRun) -> tuple[float, float, float, float]:
        most, divided = (0.0, 0.0, 0.0, 0.0), self.problem.cost_context.divided_by(run.strategy)
        for accelerator in dict.fromkeys(self.costs.accelerators):
            strategy_bytes = layer_bytes(
                layer.kind,
                run,
                accelerator,
                self.problem.cost_context,
                input_bytes_per_row=layer.input_bytes_per_row,
                parameters=layer.parameters_of(divided),
                micro_batches=self.micro_batches,
            )
            state = strategy_bytes.state_bytes
            if layer.is_last:
                state += memory.loss_bytes(self.problem.cost_context, divided, max(run.rows))
                state += self.problem.cost_context.workspace_bytes(layer.kind, max(run.rows))
            most = max(
                most,
                (strategy_bytes.kept_bytes, state, strategy_bytes.recomputed_bytes, strategy_bytes.gathered_bytes),
                key=sum,
            )
        return most


@dataclass
class StageTable:
    """Tables of a group at a pipeline position with `in_flight` micro-batches in flight (1F1B)."""

    group: GroupTables
    in_flight: float

    @cached_property
    def forward_bytes(self) -> Array:
        """Return `[class, strategy]` O_f + O_ms."""
        class_bytes = self.group.bytes
        return self.in_flight * class_bytes.stored + class_bytes.state

    @cached_property
    def peak_bytes(self) -> Array:
        """Return `[class, strategy]` O_b, assuming that the layer gathered ahead gathers the same number of bytes."""
        class_bytes = self.group.bytes
        return class_bytes.recomputed + 2 * class_bytes.gathered

    @cached_property
    def entering_bytes(self) -> Array:
        """Return `[class, layout]` buffers of messages into a stage that begins with the class."""
        sizes = np.array([layer.input_bytes_per_row for layer in self.group.sequence.classes], dtype=float)
        entering = sizes[:, None] * self.group.rows[None, :]
        return boundary_buffer_bytes(entering, 0 * entering).total(self.in_flight)

    @cached_property
    def leaving_bytes(self) -> Array:
        """Return `[class, layout]` buffers of messages out of a stage that ends with the class, plus its saved outputs."""
        sizes = np.array([layer.output_bytes_per_row for layer in self.group.sequence.classes], dtype=float)
        leaving = sizes[:, None] * self.group.rows[None, :]
        return boundary_buffer_bytes(0 * leaving, leaving).total(self.in_flight)

    def choices(
        self, first: int, end: int, steady_weight: float, budget_bytes: float, *, gathered_bytes: float | None = None
    ) -> StageChoices:
        """Return the programme of a stage with these layers, which minimises last + weight × steady seconds.

        O_b counts until the last backward: activations of later micro-batches are still in memory, and weights are
        prefetched. `gathered_bytes` reserves that memory for gathered weights and excludes strategies that gather more.
        """
        group = self.group
        members = np.array(group.sequence.range_classes(first, end))
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
            transformation_seconds=(1 + steady_weight) * group.transformation_seconds[members],
            layouts=group.layouts,
            forward_bytes=forward,
            peak_bytes=peak,
            released_bytes=np.zeros_like(forward),
            budget_bytes=budget_bytes - (gathered_bytes or 0.0),
        )

    def gathered_limits(self, first: int, end: int) -> list[float]:
        """Return limits on gathered bytes to try: 0, and each value that some layer and strategy need."""
        gathered = self.group.bytes.gathered[np.array(self.group.sequence.range_classes(first, end))]
        return [float(size) for size in np.unique(np.append(gathered, 0.0))]

    def seconds(self, first: int, end: int, path: tuple[int, ...]) -> tuple[float, float]:
        """Return steady and last seconds of an assignment."""
        group = self.group
        members = np.array(group.sequence.range_classes(first, end))
        steady, last = group.seconds
        chosen = np.array(path)
        layouts = group.layouts[chosen]
        moved = float(group.transformation_seconds[members[1:], layouts[:-1], layouts[1:]].sum())
        return float(steady[members, chosen].sum()) + moved, float(last[members, chosen].sum()) + moved

    def exact_bytes(self, first: int, path: tuple[int, ...]) -> tuple[float, float]:
        """Return the fullest device's bytes by the exact memory model, and the most missing bytes of any device (<= 0: none)."""
        group = self.group
        stage = Stage(group.costs.devices, group.layer_runs(first, path))
        parts = memory.stage_memory(
            stage,
            node_layouts(stage),
            group.problem.cost_context,
            in_flight_count=self.in_flight,
            micro_batches=group.micro_batches,
        )
        sizes = group.problem.cost_context.memory_of_node
        sizes_held = [part.total_bytes for part in parts]
        lacks = [size - sizes[device.node] for size, device in zip(sizes_held, stage.devices, strict=True)]
        return float(max(sizes_held)), float(max(lacks))
