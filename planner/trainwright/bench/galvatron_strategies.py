"""The strategies that Galvatron-BMW compares (§VII-A): one strategy for all layers, and searches over part of the space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from operator import attrgetter

from trainwright.bench.assignments import even_blocks
from trainwright.bench.batch_sizes import Climb
from trainwright.cluster import Device
from trainwright.cost.estimate import estimate_in
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Sharding, Stage
from trainwright.search import Candidate, Control, Problem
from trainwright.search.galvatron.adjustment import adjusted
from trainwright.search.galvatron.base import balanced_solutions
from trainwright.search.galvatron.partitions import CutTables, memory_balanced_partition
from trainwright.search.galvatron.pipelines import Cut, PipelineSolution, Workbench
from trainwright.search.galvatron.tables import GroupTables, StageTable
from trainwright.search.galvatron.workflow import Explore, solutions

MICRO_BATCHES = 64
"""The most that are tried; a single stage takes the batch in one, as the paper's runtimes do."""
CUTS = 3
"""On how many cuts of the devices and the batch a search goes on once it has found a plan, the best bounds first."""
ADJUSTMENTS = 8
"""Partitions of Algorithm 2's queue that are solved for each of them."""
COSTED = 3
"""How many of a search's plans, those best by Eq. 8, are costed exactly."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """One strategy for all layers.

    Attributes:
        degrees: pipeline, data and tensor degree by the number of devices.
    """

    degrees: Callable[[int], tuple[int, int, int]]
    sharding: Sharding = Sharding.NONE
    climb: Climb = Climb()
    includes: tuple[str, ...] = ()

    def best(self, problem: Problem) -> Candidate | None:
        """The fastest number of micro-batches that fits; a single stage takes the batch in one."""
        return _fastest(problem, self.plans(problem))

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """A plan for every number of micro-batches, in powers of two; GPipe, blocks spread evenly."""
        batch = problem.global_batch_size
        pipeline, data, tensor = self.degrees(len(problem.devices))
        ends = even_blocks(problem.model, pipeline)
        if ends is None or problem.model.max_tensor_degree % tensor:
            return
        for micro_batches in _powers_of_two(batch if pipeline > 1 else 1):
            size, rest = divmod(batch, micro_batches)
            if rest or size % data:
                continue
            rows = (size // data,) * data
            stages = tuple(
                Stage(devices, (LayerRun(first, end - first, tensor, data, rows, sharding=self.sharding),))
                for devices, first, end in zip(_groups(problem.devices, pipeline), (0, *ends), ends, strict=False)
            )
            pipelines = (Pipeline(micro_batches, size, stages),)
            yield Plan(len(problem.model.layers), batch, pipelines, Schedule.GPIPE)


@dataclass(frozen=True, slots=True)
class Searched:
    """Galvatron's search over part of its space.

    Attributes:
        allows: whether layers may be run like that.
        explore: which partitions are looked at.
        schedule: GPipe, which keeps every micro-batch, where the paper does not name 1F1B.
        max_pipeline: the most stages; None: as many as there are devices.
        includes: strategies whose plans are plans of this one, too.
    """

    allows: Callable[[LayerRun], bool]
    explore: Explore
    schedule: Schedule = Schedule.GPIPE
    max_pipeline: int | None = None
    climb: Climb = Climb(factor=4, halvings=2)
    includes: tuple[str, ...] = ()

    def best(self, problem: Problem) -> Candidate | None:
        """The best plan by the exact model among the best by Eq. 8."""
        found = solutions(_PartOfSpace(problem, self), _Few(), 1, self.explore)
        return _fastest(problem, (item.plan() for item in found[:COSTED]))


class _PartOfSpace(Workbench):
    """Tables of the layer runs that are allowed, and the cuts that are open; micro-batches in powers of two."""

    def __init__(self, problem: Problem, searched: Searched) -> None:
        super().__init__(problem)
        self.searched = searched

    def group(self, devices: tuple[Device, ...], micro_batch_size: int) -> GroupTables:
        tables = super().group(devices, micro_batch_size)
        tables.runs = tuple(run for run in tables.runs if self.searched.allows(run))
        return tables

    def pipelines(self) -> Iterator[Cut]:
        most = self.searched.max_pipeline or len(self.problem.devices)
        for cut in super().pipelines():
            stages, micro_batches = len(cut.devices), cut.micro_batches
            if stages > most or micro_batches not in self._counts(stages):
                continue
            yield cut if self.searched.schedule is not Schedule.GPIPE else _GPipe(self, cut.devices, micro_batches)

    def _counts(self, stages: int) -> list[int]:
        """At least as many micro-batches as stages, where the batch has them; a single stage takes the batch in one."""
        if stages == 1:
            return [1]
        least = min(stages, self.problem.global_batch_size // stages)
        return [count for count in _powers_of_two(MICRO_BATCHES) if count >= least]


class _Few(Control):
    """Ends a search when it has found something on so many cuts, whatever the clock says."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = count()

    def expired(self) -> bool:
        return next(self._asked) >= CUTS


def bi_objective_solutions(tables: CutTables, limit_seconds: float) -> Iterator[PipelineSolution]:
    """Algorithm 2 as the paper has it: the balanced partitions, and from p_m on the queue of adjusted ones."""
    yield from balanced_solutions(tables, limit_seconds)
    start = memory_balanced_partition(tables.cut)
    if start is not None:
        yield from islice(adjusted(tables.cut, start, tables.time_balanced()), ADJUSTMENTS)


class _GPipe(Cut):
    """A pipeline whose stages keep all micro-batches until their backward."""

    @cached_property
    def stages(self) -> tuple[StageTable, ...]:
        return tuple(StageTable(group, self.micro_batches) for group in self.groups)

    def plan(self, solution: PipelineSolution) -> Plan:
        return replace(super().plan(solution), schedule=Schedule.GPIPE)


def _fastest(problem: Problem, plans: Iterable[Plan]) -> Candidate | None:
    costed = [Candidate(plan, estimate_in(plan, problem.setting)) for plan in plans]
    fitting = [candidate for candidate in costed if candidate.estimate.feasible]
    return min(fitting, key=attrgetter("estimate.iteration_seconds"), default=None)


def _groups(devices: tuple[Device, ...], count: int) -> list[tuple[Device, ...]]:
    size = len(devices) // count
    return [devices[first : first + size] for first in range(0, len(devices), size)]


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _cube(devices: int) -> tuple[int, int, int]:
    """DeepSpeed's example: 2 × 2 × 2 on eight devices, 4 × 4 × 4 on 64; on 16 the data degree is doubled."""
    side = 2 if devices < 64 else 4
    return side, devices // side**2, side


def _plain(run: LayerRun) -> bool:
    return not run.recompute


def _data_and_tensor(run: LayerRun) -> bool:
    return not run.recompute and run.sharding is Sharding.NONE


def _data(run: LayerRun) -> bool:
    return _data_and_tensor(run) and run.tensor == 1


def _anything(_: LayerRun) -> bool:
    return True


DP, TP, PP, SDP = "PyTorch DDP (DP)", "Megatron (TP)", "PyTorch GPipe (PP)", "FSDP/ZeRO-3 (SDP)"
DEEPSPEED = "DeepSpeed 3D"
UNIFORM: Mapping[str, Uniform] = {
    DP: Uniform(lambda devices: (1, devices, 1)),
    TP: Uniform(lambda devices: (1, 1, devices)),
    PP: Uniform(lambda devices: (devices, 1, 1)),
    SDP: Uniform(lambda devices: (1, devices, 1), Sharding.ZERO3),
    DEEPSPEED: Uniform(_cube),
}
_ONE_F_ONE_B = Schedule.ONE_FORWARD_ONE_BACKWARD
BI_OBJECTIVE, BASE, BMW = "Galvatron (1F1B+Bi-obj)", "Galvatron-Base", "Galvatron-BMW"
DP_TP, DP_PP, GALVATRON = "Galvatron (DP+TP)", "Galvatron (DP+PP)", "Galvatron"
_WIDE = Climb(factor=8, halvings=0)
"""Under 1F1B memory does not grow with the batch, and throughput only levels off."""
SEARCHED: Mapping[str, Searched] = {
    DP_TP: Searched(_data_and_tensor, balanced_solutions, max_pipeline=1, includes=(DP, TP)),
    DP_PP: Searched(_data, balanced_solutions, includes=(DP, PP)),
    GALVATRON: Searched(_plain, balanced_solutions, includes=(SDP, DEEPSPEED, DP_TP, DP_PP)),
    BI_OBJECTIVE: Searched(_plain, bi_objective_solutions, _ONE_F_ONE_B, climb=_WIDE, includes=(GALVATRON,)),
    BASE: Searched(_anything, balanced_solutions, climb=Climb(factor=8, halvings=2), includes=(GALVATRON,)),
    BMW: Searched(_anything, bi_objective_solutions, _ONE_F_ONE_B, climb=_WIDE, includes=(BI_OBJECTIVE, BASE)),
}
STRATEGIES: Mapping[str, Uniform | Searched] = {**UNIFORM, **SEARCHED}
"""By the names that the paper's tables give them, those that include others behind them."""
