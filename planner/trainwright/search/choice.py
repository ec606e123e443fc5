"""What searches over AMP's choices share: which degrees are open, drafts of plans, and why nothing fits."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.estimate import lacking_memory, memory_by_device
from trainwright.plan import Plan
from trainwright.search.degrees import Degrees, enumerate_degrees, micro_batch_sizes, profiled, tensor_degrees
from trainwright.search.lower_bound import LowerBounds
from trainwright.search.node_order import DeviceOrder, device_order
from trainwright.search.partition import partition
from trainwright.search.placement import Placement, megatron_placement, placed_plan
from trainwright.search.protocol import NoFeasiblePlan, Problem
from trainwright.search.ranking import Draft
from trainwright.search.stage_memory import StageMemory
from trainwright.search.stages import Stages, StageTables


def accelerators_of(problem: Problem) -> tuple[str, ...]:
    """Names of the accelerators that the nodes carry."""
    return tuple(dict.fromkeys(problem.cluster.node(name).accelerator for name in problem.nodes))


def check_profiled(problem: Problem) -> None:
    """Raises ValueError naming the first layer kind that was not profiled at degree 1 on some accelerator."""
    for accelerator in accelerators_of(problem):
        for kind in problem.model.kinds:
            if 1 not in problem.profiles.tensor_degrees(accelerator, kind.name):
                problem.profiles.cost(accelerator, kind.name, 1, 1)


def degrees_of(problem: Problem, *, max_tensor: int | None = None) -> Iterator[Degrees]:
    """Every (pipeline, data, tensor) over all devices within the limits, profiled on every accelerator."""
    devices, limits = len(problem.devices), problem.limits
    layers = len(problem.model.layers)
    tensors = tuple(
        degree
        for degree in tensor_degrees(
            problem.model, devices, min(limits.max_tensor_degree or devices, max_tensor or devices)
        )
        if profiled(problem.model, problem.profiles, accelerators_of(problem), degree)
    )
    for degrees in enumerate_degrees(devices, tensors, min(layers, limits.max_pipeline_degree or layers)):
        if degrees.data <= (limits.max_data_degree or devices):
            yield degrees


@dataclass
class Drafting:
    """Makes drafts for one problem and order of devices: tables, layer assignments by Eq. 5, and plans."""

    problem: Problem
    order: DeviceOrder
    _assignments: dict[int, NDArray[np.intp]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> Drafting:
        """With the order that Megatron's heuristic gets."""
        return cls(problem, device_order(problem))

    @cached_property
    def tables(self) -> StageTables:
        return StageTables(self.problem, self.order, StageMemory(self.problem))

    @cached_property
    def bounds(self) -> LowerBounds:
        return LowerBounds(self.problem, self.tables)

    def reordered(self, order: DeviceOrder) -> Drafting:
        """For another order of the devices; tables that do not depend on it are shared."""
        other = Drafting(self.problem, order, self._assignments)
        other.tables = replace(self.tables, order=order)
        other.bounds = self.bounds.reordered(other.tables)
        return other

    def choices(self) -> Iterator[tuple[Stages, int]]:
        """Every choice of degrees, placed as Megatron does, and rows that a replica takes at a time (AMP's mbs)."""
        for degrees in degrees_of(self.problem):
            sizes = micro_batch_sizes(self.problem.global_batch_size, degrees.data)
            if sizes:
                stages = self.tables.stages(megatron_placement(degrees))
                for rows in sizes:
                    yield stages, rows

    def assignment(self, stages: Stages, rows: int, *, limited: bool = True) -> tuple[int, ...] | None:
        """The optimum of Eq. 5 among the assignments that fit into memory (`limited`) or among all."""
        times = self.tables.times(stages, rows)
        if limited:
            times = np.where(self.tables.fits(stages, rows), times, math.inf)
        return partition(times, self.tables.exchanges(stages, rows), self.micro_batches(stages, rows))

    def micro_batches(self, stages: Stages, rows: int) -> int:
        """AMP's gas."""
        return self.problem.global_batch_size // (rows * stages.data)

    def fits(self, stages: Stages, rows: int, ends: tuple[int, ...]) -> bool:
        """Whether every device has the memory."""
        return bool(self.fitting(stages, rows, np.array([ends]))[0])

    def fitting(self, stages: Stages, rows: int, ends: NDArray[np.intp]) -> NDArray[np.bool_]:
        """[assignment] the same for many: `ends` are [assignment, stage]."""
        firsts = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        result: NDArray[np.bool_] = self.tables.fits(stages, rows)[np.arange(stages.pipeline), firsts, ends].all(axis=1)
        return result

    def assignments(self, stages: Stages, rows: int) -> NDArray[np.intp]:
        """[assignment, stage] the ends of all that fit into memory."""
        layers = len(self.problem.model.layers)
        if stages.pipeline not in self._assignments:
            cuts = combinations(range(1, layers), stages.pipeline - 1)
            self._assignments[stages.pipeline] = np.array([(*some, layers) for some in cuts], dtype=np.intp)
        every = self._assignments[stages.pipeline]
        return every[self.fitting(stages, rows, every)]

    def draft(self, stages: Stages, rows: int, ends: tuple[int, ...]) -> Draft:
        """The plan to be."""
        return next(self.drafts(stages, rows, np.array([ends])))

    def drafts(self, stages: Stages, rows: int, ends: NDArray[np.intp], choice: Hashable = None) -> Iterator[Draft]:
        """The plans to be; `ends` are [assignment, stage]."""
        bounds = self.bounds.seconds_of_all(stages, rows, ends).tolist()
        for bound, some in zip(bounds, ends.tolist(), strict=True):
            yield Draft(bound, partial(self.plan, stages.placement, rows, some), choice)

    def amp_seconds(self, stages: Stages, rows: int, ends: tuple[int, ...]) -> float:
        """T of Eq. 4 for this assignment."""
        times, exchanges = self.tables.times(stages, rows), self.tables.exchanges(stages, rows)
        taken = [float(times[i, first, end]) for i, (first, end) in enumerate(zip((0, *ends), ends, strict=False))]
        sent = sum(float(exchanges[i, end]) for i, end in enumerate(ends[:-1]))
        pipeline_seconds = (self.micro_batches(stages, rows) - 1) * max(taken) + sent + sum(taken)
        return pipeline_seconds + self.tables.sync_seconds(stages, ends)

    def unlimited_plans(self) -> Iterator[Plan]:
        """A plan for every choice with no regard to memory: what to show when nothing fits."""
        for stages, rows in self.choices():
            ends = self.assignment(stages, rows, limited=False)
            if ends is not None:
                yield self.plan(stages.placement, rows, ends)

    def plan(self, placement: Placement, rows: int, ends: Sequence[int]) -> Plan:
        batch = self.problem.global_batch_size
        return placed_plan(self.order.devices, placement, rows, ends, global_batch_size=batch)


def lack_of(problem: Problem, plan: Plan) -> tuple[int, str | None]:
    """Bytes that the plan lacks on the device that is shortest, and the same in words; (<= 0, None) where it fits."""
    held = memory_by_device(plan, problem.setting)
    cluster = problem.setting.cluster
    lack = max(size - cluster.accelerator_of(device).memory_bytes for device, size in held)
    return lack, lacking_memory(held, problem.setting)


def why_nothing_fits(problem: Problem, plans: Iterable[Plan]) -> NoFeasiblePlan:
    """The refusal, with the plan that comes closest to fitting."""
    closest: tuple[int, str, str | None] | None = None
    for plan in plans:
        lack, reason = lack_of(problem, plan)
        if closest is None or lack < closest[0]:
            closest = (lack, plan.summary(), reason)
    if closest is None:
        return NoFeasiblePlan(
            f"no plan uses all {len(problem.devices)} devices with {len(problem.model.layers)} layers, a global "
            f"batch of {problem.global_batch_size} rows and the profiled tensor degrees; change the batch size, the "
            "number of devices or the limits"
        )
    free = problem.limits.memory_headroom_ratio
    headroom = f" with {100 * free:.4g}% of it left free" if free else ""
    return NoFeasiblePlan(f"no plan fits into memory{headroom}; the closest is {closest[1]}, and there {closest[2]}")
