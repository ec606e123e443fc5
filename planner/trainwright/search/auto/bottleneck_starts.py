"""Starting plans whose slowest stage is as fast as memory allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.cost.estimate import memory_by_device
from trainwright.cost.layer_sums import Array, prefix_sums
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.cost.time_terms import TensorGroupClass, kind_table, with_recompute
from trainwright.plan import Plan, Schedule
from trainwright.search.auto.memory_first_starts import (
    Group,
    build_single_replica_plan,
    form_tensor_groups,
    state_and_input_bytes,
    tensor_degrees_by_accelerator,
)
from trainwright.search.problem import Problem

_BISECTION_STEPS = 24
_MAX_ROUNDS = 6
"""Maximum rebalancing rounds, each corrected by the memory that stages actually used."""


def bottleneck_balanced_plans(problem: Problem) -> Iterator[Plan]:
    """Yield single pipelines of tensor groups that fit, with one row per micro-batch and full recompute.

    The stage time is bisected: within it each accelerator takes the tensor degree that holds most layers per device, and
    groups that hold no layer are left out.
    """
    found_plans: list[Plan] = []
    group_tables = _build_group_tables(problem)
    stages = min(len(problem.model.layers), len(problem.devices))
    while stages > 0:
        plan = _balance_bottleneck(problem, group_tables, stages)
        if plan is not None and plan not in found_plans:
            found_plans.append(plan)
            yield plan
        stages //= 2


def _balance_bottleneck(problem: Problem, group_tables: Sequence[_GroupTables], stages: int) -> Plan | None:
    """Return a plan that fits, starting from about `stages` stages; else None."""
    extra_bytes: dict[Group, float] = {}
    for _ in range(_MAX_ROUNDS):
        search = _BottleneckSearch(problem, group_tables, stages, extra_bytes)
        split = search.fastest_split()
        if split is None:
            return None
        plan = build_single_replica_plan(problem, *split)
        resident = dict(memory_by_device(plan, problem.cost_context))
        fits = True
        for group, expected in zip(split[0], search.expected_bytes(*split), strict=True):
            fullest = max(resident[device] for device in group)
            fits = fits and fullest <= problem.cost_context.memory_of_node[group[0].node]
            extra_bytes[group] = fullest - expected
        if fits:
            return plan
    return None


@dataclass(frozen=True)
class _GroupTables:
    """Tensor groups of one accelerator and degree, as [layer + 1] prefix sums.

    Attributes:
        input_bytes: bytes per device and in-flight micro-batch.
        pass_seconds: seconds per row.
        memory_bytes: memory of a device.
    """

    name: str
    degree: int
    state_bytes: Array
    input_bytes: Array
    pass_seconds: Array
    memory_bytes: float

    def resident_bytes(self, in_flight: float) -> Array:
        """Return [layer + 1] bytes with `in_flight` micro-batches."""
        resident_bytes: Array = self.state_bytes + in_flight * self.input_bytes
        return resident_bytes

    def max_end(self, first: int, seconds: float, in_flight: float, extra_bytes: float) -> int:
        """Return the largest end of a stage from `first` within the seconds and memory."""
        resident = self.resident_bytes(in_flight)
        memory_end = int(np.searchsorted(resident, resident[first] + self.memory_bytes - extra_bytes, side="right"))
        time_end = int(np.searchsorted(self.pass_seconds, self.pass_seconds[first] + seconds, side="right"))
        return max(min(memory_end, time_end) - 1, first)


_LayerSplit = tuple[list[Group], list[int]]
"""(groups, end layer of each group)."""


@dataclass(frozen=True)
class _BottleneckSearch:
    """Bisection for about `stages` stages; `extra_bytes` corrects the layers' estimate per group."""

    problem: Problem
    group_tables: Sequence[_GroupTables]
    stages: int
    extra_bytes: Mapping[Group, float]

    def fastest_split(self) -> _LayerSplit | None:
        """Return the split with the smallest stage time; None if memory never suffices."""
        low, high = 0.0, max((float(table.pass_seconds[-1]) for table in self.group_tables), default=0.0)
        best = self._split_within(high)
        for _ in range(_BISECTION_STEPS if best is not None else 0):
            middle = (low + high) / 2
            layer_split = self._split_within(middle)
            low, high = (middle, high) if layer_split is None else (low, middle)
            best = layer_split or best
        return best

    def expected_bytes(self, groups: Sequence[Group], ends: Sequence[int]) -> list[float]:
        """Return each group's estimated layer bytes."""
        sizes = {(table.name, table.degree): table for table in self.group_tables}
        group_bytes = []
        for number, (group, first, end) in enumerate(zip(groups, (0, *ends), ends, strict=False)):
            size = sizes[self.problem.cluster.node(group[0].node).accelerator, len(group)]
            resident_bytes = size.resident_bytes(self._in_flight(number))
            group_bytes.append(float(resident_bytes[end] - resident_bytes[first]))
        return group_bytes

    def _in_flight(self, number: int) -> float:
        """Return in-flight micro-batches of a stage; those beyond the expected number count as the last."""
        schedule, stage = Schedule.ONE_FORWARD_ONE_BACKWARD, min(number, self.stages - 1)
        return in_flight_micro_batches(schedule, self.problem.global_batch_size, stage, self.stages)

    def _split_within(self, seconds: float) -> _LayerSplit | None:
        """Fill groups with layers in order; return None if some layers are left."""
        chosen: dict[str, _GroupTables] = {}
        for table in self.group_tables:
            best_table = chosen.get(table.name)
            if self._layers_per_device(table, seconds) > (
                self._layers_per_device(best_table, seconds) if best_table else 0.0
            ):
                chosen[table.name] = table
        groups, ends = list[Group](), [0]
        for group in (
            form_tensor_groups(self.problem, {name: best.degree for name, best in chosen.items()}) if chosen else ()
        ):
            size = chosen[self.problem.cluster.node(group[0].node).accelerator]
            end = size.max_end(ends[-1], seconds, self._in_flight(len(groups)), self.extra_bytes.get(group, 0.0))
            if end > ends[-1]:
                groups.append(group)
                ends.append(end)
        return (groups, ends[1:]) if ends[-1] == len(self.problem.model.layers) else None

    def _layers_per_device(self, tables: _GroupTables, seconds: float) -> float:
        """Return layers of the most common kind per device."""
        return (
            tables.max_end(self._commonest_layer, seconds, self.stages // 2, 0.0) - self._commonest_layer
        ) / tables.degree

    @cached_property
    def _commonest_layer(self) -> int:
        """Return the first layer of the most common kind."""
        layers = self.problem.model.layers
        return layers.index(Counter(layers).most_common(1)[0][0])


def _build_group_tables(problem: Problem) -> list[_GroupTables]:
    """Build tables of all formable groups, smallest degrees first."""
    tables = []
    for name, degrees in tensor_degrees_by_accelerator(problem).items():
        for degree in degrees:
            groups = form_tensor_groups(problem, {name: degree})
            if groups:
                state, inputs = state_and_input_bytes(problem, degree)
                memory = max(problem.cost_context.memory_of_node[group[0].node] for group in groups)
                sums = [
                    prefix_sums(layer_values)
                    for layer_values in (state, inputs, _layer_pass_seconds(problem, groups[0]))
                ]
                tables.append(_GroupTables(name, degree, sums[0], sums[1], sums[2], float(memory)))
    return tables


def _layer_pass_seconds(problem: Problem, group: Group) -> Array:
    """Return [layer] seconds per row: forward, recompute and backward."""
    context = problem.cost_context
    collective = context.collectives.all_reduce((tuple(device.node for device in group),))
    accelerator = problem.cluster.node(group[0].node).accelerator
    table = with_recompute(kind_table(TensorGroupClass((accelerator,), len(group), collective), 1, context))
    by_layer: Array = (table.forward_pass_seconds + table.backward_pass_seconds)[context.kind_numbers]
    return by_layer
