"""Uniform plans: valid degrees, layer assignments, memory feasibility, and the error if none is feasible."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.estimate import memory_by_device, memory_shortfalls, rows_refusal
from trainwright.cost.time_terms import pipeline_seconds
from trainwright.plan import Plan, divisors
from trainwright.quantity import format_bytes
from trainwright.search.candidates import LazyCandidate
from trainwright.search.degrees import Degrees, enumerate_degrees, is_open, micro_batch_sizes
from trainwright.search.node_order import DeviceOrder, device_order
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.problem import NoFeasiblePlan, NoPlanFits, Problem
from trainwright.search.uniform.critical_path_bound import CriticalPathBound
from trainwright.search.uniform.layer_partition import partition, with_messages
from trainwright.search.uniform.placed_stages import (
    PlacedStages,
    Placement,
    PlacementTables,
    megatron_placement,
    plan_from_placement,
)


def accelerators_of(problem: Problem) -> tuple[str, ...]:
    """Return the distinct accelerators of the problem's nodes."""
    return tuple(dict.fromkeys(problem.cluster.node(name).accelerator for name in problem.nodes))


def check_profiled(problem: Problem) -> None:
    """Raise ValueError naming the first layer kind without a profile at degree 1 on some accelerator."""
    for accelerator in accelerators_of(problem):
        for kind in problem.model.kinds:
            if 1 not in problem.profiles.tensor_degrees(accelerator, kind.name):
                problem.profiles.cost(accelerator, kind.name, 1, 1)


def open_degrees(problem: Problem, *, max_tensor: int | None = None) -> Iterator[Degrees]:
    """Yield every (pipeline, data, tensor) over all devices that is within the limits and profiled on every accelerator."""
    devices, accelerators = len(problem.devices), accelerators_of(problem)
    tensors = tuple(degree for degree in divisors(devices) if degree <= (max_tensor or devices))
    for degrees in enumerate_degrees(devices, tensors, problem.limits.max_stages(len(problem.model.layers))):
        if is_open(problem, degrees.strategy, accelerators):
            yield degrees


@dataclass
class UniformPlanSpace:
    """Uniform plans of one problem in one device order: tables, layer assignments by Eq. 5, lazy candidates."""

    problem: Problem
    order: DeviceOrder
    _all_assignments: dict[int, NDArray[np.intp]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> UniformPlanSpace:
        """Return the plan space in the default device order."""
        return cls(problem, device_order(problem))

    @cached_property
    def tables(self) -> PlacementTables:
        return PlacementTables(self.problem, self.order)

    @cached_property
    def bounds(self) -> CriticalPathBound:
        return CriticalPathBound(self.problem, self.tables)

    def with_order(self, order: DeviceOrder) -> UniformPlanSpace:
        """Return the plan space in another device order; tables that do not depend on it are shared."""
        other = UniformPlanSpace(self.problem, order, self._all_assignments)
        other.tables = replace(self.tables, order=order)
        other.bounds = self.bounds.with_tables(other.tables)
        return other

    def choices(self) -> Iterator[tuple[PlacedStages, int]]:
        """Yield every choice of degrees, in Megatron's placement, with the rows that a replica takes at a time (AMP's mbs)."""
        for degrees in open_degrees(self.problem):
            sizes = micro_batch_sizes(self.problem.global_batch_size, degrees.data)
            if sizes:
                stages = self.tables.place_stages(megatron_placement(degrees))
                for rows in sizes:
                    yield stages, rows

    def best_assignment(self, stages: PlacedStages, rows: int, *, within_memory: bool = True) -> tuple[int, ...] | None:
        """Return the ends that minimise Eq. 5, by default among those that fit into memory.

        Unless the runtime hides transfers, t_i includes the messages of stage i.
        """
        times = self.tables.times(stages, rows)
        if within_memory:
            times = np.where(self.tables.fits(stages, rows), times, math.inf)
        messages = self.tables.boundary_seconds(stages, rows)
        if not self.problem.runtime.hides_transfers:
            times, messages = with_messages(times, messages), np.zeros_like(messages)
        return partition(times, messages, self.micro_batches(stages, rows))

    def micro_batches(self, stages: PlacedStages, rows: int) -> int:
        """Return the number of micro-batches (AMP's gas)."""
        return self.problem.global_batch_size // (rows * stages.data)

    def fits(self, stages: PlacedStages, rows: int, ends: tuple[int, ...]) -> bool:
        """Return whether every device has enough memory."""
        return bool(self.fitting_mask(stages, rows, np.array([ends]))[0])

    def fitting_mask(self, stages: PlacedStages, rows: int, ends: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return `[assignment]` whether `ends[assignment, stage]` fit into memory."""
        firsts = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        result: NDArray[np.bool_] = self.tables.fits(stages, rows)[np.arange(stages.pipeline), firsts, ends].all(axis=1)
        return result

    def feasible_assignments(self, stages: PlacedStages, rows: int) -> NDArray[np.intp]:
        """Return `[assignment, stage]` ends of all assignments that fit into memory."""
        layers = len(self.problem.model.layers)
        if stages.pipeline not in self._all_assignments:
            cuts = combinations(range(1, layers), stages.pipeline - 1)
            self._all_assignments[stages.pipeline] = np.array([(*some, layers) for some in cuts], dtype=np.intp)
        all_assignments = self._all_assignments[stages.pipeline]
        return all_assignments[self.fitting_mask(stages, rows, all_assignments)]

    def lazy_candidate(self, stages: PlacedStages, rows: int, ends: tuple[int, ...]) -> LazyCandidate:
        """Return the lazy candidate of one assignment."""
        return next(self.lazy_candidates(stages, rows, np.array([ends])))

    def lazy_candidates(
        self, stages: PlacedStages, rows: int, ends: NDArray[np.intp], choice: Hashable = None
    ) -> Iterator[LazyCandidate]:
        """Yield the lazy candidates of `ends[assignment, stage]`."""
        bounds = self.bounds.seconds_of_all(stages, rows, ends).tolist()
        for bound, stage_ends in zip(bounds, ends.tolist(), strict=True):
            yield LazyCandidate(bound, partial(self.plan, stages.placement, rows, stage_ends), choice)

    def amp_seconds(self, stages: PlacedStages, rows: int, ends: tuple[int, ...]) -> float:
        """Return T of Eq. 4 for this assignment."""
        times, boundaries = self.tables.times(stages, rows), self.tables.boundary_seconds(stages, rows)
        stage_seconds = [
            float(times[i, first, end]) for i, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
        ]
        boundary_seconds = sum(float(boundaries[i, end]) for i, end in enumerate(ends[:-1]))
        path_seconds, micro_batches = boundary_seconds + sum(stage_seconds), self.micro_batches(stages, rows)
        return pipeline_seconds(path_seconds, max(stage_seconds), micro_batches) + self.tables.sync_seconds(
            stages, ends
        )

    def plans_ignoring_memory(self) -> Iterator[Plan]:
        """Yield one plan per choice, feasible or not, to find the one closest to fitting."""
        for stages, rows in self.choices():
            ends = self.best_assignment(stages, rows, within_memory=False)
            if ends is not None:
                yield self.plan(stages.placement, rows, ends)

    def plan(self, placement: Placement, rows: int, ends: Sequence[int]) -> Plan:
        batch = self.problem.global_batch_size
        plan = plan_from_placement(self.order.devices, placement, rows, ends, global_batch_size=batch)
        return with_runtime_choices(plan, self.problem.cost_context)


def memory_shortfall(problem: Problem, plan: Plan) -> tuple[int, str | None]:
    """Return the bytes that the plan exceeds memory by on its worst device, with a sentence; (<= 0, None) if it fits."""
    resident = memory_by_device(plan, problem.cost_context)
    cluster = problem.cost_context.cluster
    shortfall = max(size - cluster.accelerator_of(device).memory_bytes for device, size in resident)
    return shortfall, memory_shortfalls(resident, problem.cost_context)


def infeasibility_error(problem: Problem, plans: Iterable[Plan]) -> NoFeasiblePlan:
    """Return the error, which names the plan closest to fitting."""
    closest: tuple[int, str, str | None] | None = None
    for given in plans:
        plan = with_runtime_choices(given, problem.cost_context)
        if rows_refusal(plan, problem.cost_context) is not None:
            continue
        shortfall, reason = memory_shortfall(problem, plan)
        if closest is None or shortfall < closest[0]:
            closest = (shortfall, plan.summary(), reason)
    why = f" ({problem.least_rows_words})" if problem.least_rows > 1 else ""
    if closest is None:
        return NoFeasiblePlan(
            f"no plan uses all {len(problem.devices)} devices with {len(problem.model.layers)} layers, a global "
            f"batch of {problem.global_batch_size} rows and the profiled tensor degrees{why}; change the batch size, the "
            "number of devices or the limits"
        )
    headroom = problem.limits.headroom_words
    return NoPlanFits(
        f"no plan fits into memory{headroom}{why}; the closest is {closest[1]}, and there {closest[2]}{_excess_words(problem)}"
    )


def exceeds_all_memory(problem: Problem) -> bool:
    """Return whether weights, gradients and optimizer alone exceed the memory of all devices, so that no plan can fit."""
    return problem.cost_context.model_state_bytes > _memory_bytes(problem)


def _memory_bytes(problem: Problem) -> int:
    return sum(problem.cost_context.memory_of_node[device.node] for device in problem.devices)


def _excess_words(problem: Problem) -> str:
    if not exceeds_all_memory(problem):
        return ""
    state, memory = problem.cost_context.model_state_bytes, _memory_bytes(problem)
    return (
        f". Weights, gradients and optimizer alone take {format_bytes(state)}, and all devices together have "
        f"{format_bytes(memory)}: use more devices or a smaller model"
    )
