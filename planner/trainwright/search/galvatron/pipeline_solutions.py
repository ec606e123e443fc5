"""Pipeline splits with the costs and solutions of their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, permutations

import numpy as np

from trainwright.cluster import Device
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.cost.time_terms import pipeline_seconds
from trainwright.plan import Pipeline, Plan, Schedule, Stage, divisors
from trainwright.search.galvatron.galvatron_model import StageGroupCosts, boundary_alpha_beta
from trainwright.search.galvatron.layer_classes import LayerSequence, layer_sequence
from trainwright.search.galvatron.relaxed_tables import RelaxedStageOptions
from trainwright.search.galvatron.strategy_dp import StrategyAssignment, assign_strategies
from trainwright.search.galvatron.strategy_tables import GroupTables, StageTable
from trainwright.search.node_order import canonical_node_order, device_order, device_orders
from trainwright.search.problem import Problem

StageEnds = tuple[int, ...]

MAX_ORDERS = 6
"""Maximum number of orders along the pipeline tried for nodes, and again for accelerators."""
CORRECTIONS = 4
"""Maximum number of repeated assignments of a stage when the exact memory model finds more bytes than the tables."""
_MAX_COMPARED_NODES = 64


@dataclass(frozen=True, slots=True)
class StageSolution:
    """Strategies of a stage's layers, its steady and last seconds per micro-batch, and its bytes (E_all)."""

    strategies: tuple[int, ...]
    steady_seconds: float
    last_seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class PipelineSolution:
    """Stages of a partition, and Eq. 8 including the messages between them."""

    ends: StageEnds
    stages: tuple[StageSolution, ...]
    seconds: float


@dataclass
class GroupTablesCache:
    """Cost tables and stage solutions of one problem, shared by all pipeline splits."""

    problem: Problem
    _costs: dict[object, StageGroupCosts] = field(default_factory=dict)
    _groups: dict[object, GroupTables] = field(default_factory=dict)
    _solved: dict[object, StageSolution | None] = field(default_factory=dict)
    _options: dict[object, RelaxedStageOptions] = field(default_factory=dict)

    @cached_property
    def sequence(self) -> LayerSequence:
        return layer_sequence(self.problem.model)

    def pipeline_splits(self) -> Iterator[PipelineSplit]:
        """Yield every pipeline degree, order of accelerator types and number of micro-batches (divisors of the batch)."""
        problem, batch = self.problem, self.problem.global_batch_size
        for devices in self._device_orders():
            most = problem.limits.max_stages(min(len(problem.model.layers), len(devices)))
            for degree in divisors(len(devices)):
                if degree > most:
                    continue
                size = len(devices) // degree
                groups = tuple(devices[first : first + size] for first in range(0, len(devices), size))
                for micro_batches in divisors(batch):
                    cut = PipelineSplit(self, groups, micro_batches)
                    if all(group.runs for group in cut.groups):
                        yield cut

    def _device_orders(self) -> list[tuple[Device, ...]]:
        """Return orders of unlike nodes if they are few, and always orders that keep devices of one accelerator adjacent.

        Equivalent nodes are taken in list order, so nodes are first sorted canonically by their links.
        """
        problem = replace(self.problem, cluster=canonical_node_order(self.problem.cluster))
        orders = [order.devices for order in device_orders(problem, MAX_ORDERS)]
        order = device_order(problem)
        for places in islice(permutations(range(len(order.accelerator_names))), MAX_ORDERS):
            sequence = np.argsort([places[number] for number in order.accelerator_numbers], kind="stable")
            orders.append(tuple(order.devices[index] for index in sequence))
        return list(dict.fromkeys(orders))

    def group(self, devices: tuple[Device, ...], micro_batch_size: int) -> GroupTables:
        """Return the tables of a stage's devices, shared by equivalent groups."""
        signature = self._signature(devices)
        if signature not in self._costs:
            self._costs[signature] = StageGroupCosts(
                devices, self.problem.cost_context, self._exposed_ratio(len(devices))
            )
        key = signature, micro_batch_size
        if key not in self._groups:
            self._groups[key] = GroupTables(self.problem, self.sequence, self._costs[signature], micro_batch_size)
        return self._groups[key]

    def _exposed_ratio(self, devices: int) -> float | None:
        """Return the stage's share of all devices, None if gradient reduction overlaps compute.

        It scales the stage's exposed gradient reduction, which all stages do at about the same time.
        """
        return None if self.problem.runtime.overlaps_gradients else devices / len(self.problem.devices)

    def _signature(self, devices: tuple[Device, ...]) -> object:
        """Return a key that is equal for groups with equivalent devices and links."""
        cluster = self.problem.cluster
        nodes = list(dict.fromkeys(device.node for device in devices))
        if len(nodes) > _MAX_COMPARED_NODES:
            return devices
        places = tuple(nodes.index(device.node) for device in devices)
        links = tuple(
            (link.latency_seconds, link.bandwidth_bytes_per_second, link.flow_bytes_per_second)
            for link in (cluster.link(a, b) for a in nodes for b in nodes if a != b or places.count(nodes.index(a)) > 1)
        )
        return tuple(cluster.accelerator_of(device).name for device in devices), places, links

    def cached_options(self, key: object, make: Callable[[], RelaxedStageOptions]) -> RelaxedStageOptions:
        """Return the options cached under the key, made on first use."""
        if key not in self._options:
            self._options[key] = make()
        return self._options[key]

    def solve(self, stage: StageTable, first: int, end: int, steady_weight: float) -> StageSolution | None:
        """Solve the strategy programme of a stage, once for equal ranges of layers."""
        key = id(stage.group), stage.in_flight, int(self.sequence.range_number[first, end]), steady_weight
        if key not in self._solved:
            self._solved[key] = _solve_within_memory(stage, first, end, steady_weight)
        return self._solved[key]


def _solve_within_memory(stage: StageTable, first: int, end: int, steady_weight: float) -> StageSolution | None:
    """Return an assignment that the exact memory model accepts too.

    That model adds the largest recomputed layer and the largest gathered ones even if they are different layers; the
    missing bytes are subtracted from the budget. If that leaves no assignment, limits on gathered bytes are tried.
    """
    budget = stage.group.budget_bytes
    for _ in range(CORRECTIONS):
        assignment = assign_strategies(stage.choices(first, end, steady_weight, budget))
        if assignment is None:
            break
        solution, lack = _check_memory(stage, first, end, assignment)
        if lack <= 0:
            return solution
        budget = min(budget, assignment.bytes) - lack - 1
    if budget == stage.group.budget_bytes:
        return None
    best: tuple[float, StageSolution] | None = None
    for limit in stage.gathered_limits(first, end):
        assignment = assign_strategies(
            stage.choices(first, end, steady_weight, stage.group.budget_bytes, gathered_bytes=limit)
        )
        if assignment is not None and (best is None or assignment.seconds < best[0]):
            solution, lack = _check_memory(stage, first, end, assignment)
            best = (assignment.seconds, solution) if lack <= 0 else best
    return best[1] if best else None


def _check_memory(
    stage: StageTable, first: int, end: int, assignment: StrategyAssignment
) -> tuple[StageSolution, float]:
    """Return the solution, and the bytes missing by the exact memory model."""
    peak_bytes, lack = stage.exact_bytes(first, assignment.strategies)
    return StageSolution(assignment.strategies, *stage.seconds(first, end, assignment.strategies), peak_bytes), lack


@dataclass
class PipelineSplit:
    """Devices of every stage (PP first, takeaway #1) and the number of micro-batches, m."""

    cache: GroupTablesCache
    devices: tuple[tuple[Device, ...], ...]
    micro_batches: int
    _solutions: dict[StageEnds, PipelineSolution | None] = field(default_factory=dict)

    @property
    def micro_batch_size(self) -> int:
        """Return B_m, over all replicas of a stage."""
        return self.cache.problem.global_batch_size // self.micro_batches

    @cached_property
    def groups(self) -> tuple[GroupTables, ...]:
        """Return the tables of every stage's devices."""
        return tuple(self.cache.group(devices, self.micro_batch_size) for devices in self.devices)

    @cached_property
    def stages(self) -> tuple[StageTable, ...]:
        """Return the tables of every stage with its micro-batches in flight under 1F1B."""
        count = len(self.devices)
        schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
        chunks = self.cache.problem.cost_context.chunks_of_equal_stages(self.micro_batches, count)
        return tuple(
            StageTable(group, in_flight_micro_batches(schedule, self.micro_batches, number, count, chunks))
            for number, group in enumerate(self.groups)
        )

    @cached_property
    def exchange_seconds(self) -> Array:
        """Return `[boundary, end]` forward and backward message seconds of a micro-batch if the stage ends before layer `end`."""
        model = self.cache.problem.model
        sizes = [self.micro_batch_size * model.output_bytes_per_row(layer) for layer in range(len(model.layers))]
        rates = [boundary_alpha_beta(a, b, self.cache.problem.cost_context) for a, b in pairwise(self.devices)]
        latency, per_byte = np.array(rates).reshape(-1, 2).T
        seconds: Array = latency[:, None] + per_byte[:, None] * np.array([0.0, *sizes])[None, :]
        return seconds

    @cached_property
    def steady_weights(self) -> tuple[float, ...]:
        """Return weights of steady micro-batches relative to the last: none, an average stage's and the longest stage's."""
        repeats = self.micro_batches - 1
        if len(self.devices) == 1 or not repeats:
            return (float(repeats),)
        return (0.0, repeats / len(self.devices), float(repeats))

    def solution(self, ends: StageEnds) -> PipelineSolution | None:
        """Return every stage's strategies within memory and Eq. 8, None if a stage does not fit."""
        if ends not in self._solutions:
            self._solutions[ends] = self._solve(ends)
        return self._solutions[ends]

    def _solve(self, ends: StageEnds) -> PipelineSolution | None:
        options = []
        for stage, (first, end) in zip(self.stages, pairwise((0, *ends)), strict=True):
            options.append(self._stage_solutions(stage, first, end))
            if not options[-1]:
                return None
        best: PipelineSolution | None = None
        for limit in sorted({solution.steady_seconds for stage in options for solution in stage}):
            within = [[s for s in stage if s.steady_seconds <= limit] for stage in options]
            if not all(within):
                continue
            chosen = tuple(min(stage, key=lambda s: s.last_seconds) for stage in within)
            combined = self._combine(ends, chosen)
            if best is None or combined.seconds < best.seconds:
                best = combined
        return best

    def _combine(self, ends: StageEnds, stages: tuple[StageSolution, ...]) -> PipelineSolution:
        sent = sum(float(self.exchange_seconds[number, end]) for number, end in enumerate(ends[:-1]))
        longest = max(stage.steady_seconds for stage in stages)
        last = sum(stage.last_seconds for stage in stages)
        return PipelineSolution(ends, stages, pipeline_seconds(last, longest, self.micro_batches) + sent)

    def variants(self, solution: PipelineSolution) -> list[PipelineSolution]:
        """Return the solution and others of its partition, each with all stages at one weight of steady micro-batches."""
        ends = solution.ends
        options = [
            self._stage_solutions(stage, first, end)
            for stage, (first, end) in zip(self.stages, pairwise((0, *ends)), strict=True)
        ]
        ways = range(max(len(stage) for stage in options))
        others = (self._combine(ends, tuple(stage[min(way, len(stage) - 1)] for stage in options)) for way in ways)
        return list(dict.fromkeys((solution, *others)))

    def _stage_solutions(self, stage: StageTable, first: int, end: int) -> list[StageSolution]:
        """Solve the stage at every weight; one solution for the least and largest weight is optimal between them too."""
        least, *between, largest = self.steady_weights if len(self.steady_weights) > 1 else self.steady_weights * 2
        solutions = [self.cache.solve(stage, first, end, weight) for weight in (least, largest)]
        if solutions[0] != solutions[1]:
            solutions += [self.cache.solve(stage, first, end, weight) for weight in between]
        return [solution for solution in solutions if solution is not None]

    def plan(self, solution: PipelineSolution) -> Plan:
        """Build the plan of a solution; adjacent layers with equal strategies become one run."""
        problem = self.cache.problem
        stages = tuple(
            Stage(devices, group.layer_runs(first, stage.strategies))
            for devices, group, first, stage in zip(
                self.devices, self.groups, (0, *solution.ends), solution.stages, strict=False
            )
        )
        pipeline = Pipeline(self.micro_batches, self.micro_batch_size, stages)
        return Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))
