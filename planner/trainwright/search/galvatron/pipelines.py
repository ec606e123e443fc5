"""Ways to cut the devices into stages and the batch into micro-batches, and what their stages cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost import memory
from trainwright.cost.galvatron_layers import GroupCosts
from trainwright.cost.galvatron_links import exchange
from trainwright.plan import Pipeline, Plan, Schedule, Stage
from trainwright.search.degrees import divisors
from trainwright.search.galvatron.relaxed import StageOptions
from trainwright.search.galvatron.sequence import Sequence, sequence_of
from trainwright.search.galvatron.stage_programme import Assignment, assign
from trainwright.search.galvatron.tables import GroupTables, StageTable
from trainwright.search.node_order import device_order, device_orders
from trainwright.search.protocol import Problem
from trainwright.search.relisting import relisted

Array = NDArray[np.float64]
Ends = tuple[int, ...]

MAX_ORDERS = 6
"""Orders of nodes along the pipeline that are tried, and of accelerators: all of three, the first of more."""
CORRECTIONS = 4
"""How often a stage is assigned anew where the exact memory model finds more bytes than the tables."""
_MAX_COMPARED_NODES = 64


@dataclass(frozen=True, slots=True)
class StageSolution:
    """A strategy for every layer of a stage, with its seconds by micro-batch and E_all."""

    strategies: tuple[int, ...]
    steady_seconds: float
    last_seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class PipelineSolution:
    """All stages of a partition, and Eq. 8 with the messages between them."""

    ends: Ends
    stages: tuple[StageSolution, ...]
    seconds: float


@dataclass
class Workbench:
    """Tables of one problem, shared by all pipelines."""

    problem: Problem
    _costs: dict[object, GroupCosts] = field(default_factory=dict)
    _groups: dict[object, GroupTables] = field(default_factory=dict)
    _solved: dict[object, StageSolution | None] = field(default_factory=dict)
    _options: dict[object, StageOptions] = field(default_factory=dict)

    @cached_property
    def sequence(self) -> Sequence:
        return sequence_of(self.problem.model)

    def pipelines(self) -> Iterator[Cut]:
        """Every pipeline degree, order of accelerator types and number of micro-batches (all divisors of the batch)."""
        limits, batch = self.problem.limits, self.problem.global_batch_size
        for devices in self._device_orders():
            most = min(len(self.problem.model.layers), limits.max_pipeline_degree or len(devices))
            for degree in divisors(len(devices)):
                if degree > most:
                    continue
                size = len(devices) // degree
                groups = tuple(devices[first : first + size] for first in range(0, len(devices), size))
                for micro_batches in divisors(batch):
                    cut = Cut(self, groups, micro_batches)
                    if all(group.runs for group in cut.groups):
                        yield cut

    def _device_orders(self) -> list[tuple[Device, ...]]:
        """Every order of unlike nodes where they are few, and devices of one accelerator side by side in any case.

        Where nodes are equally well placed the one listed first goes first, so they are listed by their links.
        """
        problem = replace(self.problem, cluster=relisted(self.problem.cluster))
        found = [order.devices for order in device_orders(problem, MAX_ORDERS)]
        order = device_order(problem)
        for places in islice(permutations(range(len(order.names))), MAX_ORDERS):
            sequence = np.argsort([places[number] for number in order.accelerators], kind="stable")
            found.append(tuple(order.devices[index] for index in sequence))
        return list(dict.fromkeys(found))

    def group(self, devices: tuple[Device, ...], micro_batch_size: int) -> GroupTables:
        """The tables of a stage's devices; groups that are alike share them."""
        signature = self._signature(devices)
        if signature not in self._costs:
            self._costs[signature] = GroupCosts(devices, self.problem.setting, self._exposed_ratio(len(devices)))
        key = signature, micro_batch_size
        if key not in self._groups:
            self._groups[key] = GroupTables(self.problem, self.sequence, self._costs[signature], micro_batch_size)
        return self._groups[key]

    def _exposed_ratio(self, devices: int) -> float | None:
        """Of the sums behind the last backward, which all stages do at about the same time, each counts its share."""
        return None if self.problem.runtime.overlaps_gradients else devices / len(self.problem.devices)

    def _signature(self, devices: tuple[Device, ...]) -> object:
        """The same for groups whose devices and links are alike."""
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

    def once(self, key: object, make: Callable[[], StageOptions]) -> StageOptions:
        """What was made for the key, the first time anew."""
        if key not in self._options:
            self._options[key] = make()
        return self._options[key]

    def solve(self, stage: StageTable, first: int, end: int, steady_weight: float) -> StageSolution | None:
        """The programme of a stage; ranges of equal layers are solved once."""
        key = id(stage.group), stage.in_flight, int(self.sequence.node[first, end]), steady_weight
        if key not in self._solved:
            self._solved[key] = _fitting(stage, first, end, steady_weight)
        return self._solved[key]


def _fitting(stage: StageTable, first: int, end: int, steady_weight: float) -> StageSolution | None:
    """An assignment that the exact memory model accepts too.

    That model adds the largest recomputed layer and the largest gathered ones even where they are different layers; what
    it finds missing is taken off the budget. Where that leaves none, limits of what is gathered are tried.
    """
    budget = stage.group.budget_bytes
    for _ in range(CORRECTIONS):
        found = assign(stage.choices(first, end, steady_weight, budget))
        if found is None:
            break
        solution, lack = _checked(stage, first, end, found)
        if lack <= 0:
            return solution
        budget = min(budget, found.bytes) - lack - 1
    if budget == stage.group.budget_bytes:
        return None
    best: tuple[float, StageSolution] | None = None
    for limit in stage.gathered_limits(first, end):
        found = assign(stage.choices(first, end, steady_weight, stage.group.budget_bytes, gathered_bytes=limit))
        if found is not None and (best is None or found.seconds < best[0]):
            solution, lack = _checked(stage, first, end, found)
            best = (found.seconds, solution) if lack <= 0 else best
    return best[1] if best else None


def _checked(stage: StageTable, first: int, end: int, found: Assignment) -> tuple[StageSolution, float]:
    """The solution, and what the exact memory model finds missing."""
    held, lack = stage.exact_bytes(first, found.strategies)
    return StageSolution(found.strategies, *stage.seconds(first, end, found.strategies), held), lack


@dataclass
class Cut:
    """The devices of every stage (PP first, takeaway #1) and the number of micro-batches, m."""

    bench: Workbench
    devices: tuple[tuple[Device, ...], ...]
    micro_batches: int
    _solutions: dict[Ends, PipelineSolution | None] = field(default_factory=dict)

    @property
    def micro_batch_size(self) -> int:
        """B_m, over all replicas of a stage."""
        return self.bench.problem.global_batch_size // self.micro_batches

    @cached_property
    def groups(self) -> tuple[GroupTables, ...]:
        """Tables of every stage's devices."""
        return tuple(self.bench.group(devices, self.micro_batch_size) for devices in self.devices)

    @cached_property
    def stages(self) -> tuple[StageTable, ...]:
        """The same with the micro-batches that 1F1B keeps in flight there."""
        count = len(self.devices)
        schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
        return tuple(
            StageTable(group, memory.in_flight(schedule, self.micro_batches, number, count))
            for number, group in enumerate(self.groups)
        )

    @cached_property
    def exchange_seconds(self) -> Array:
        """[boundary, end] of one micro-batch, both ways, where the pipeline is cut before layer `end`."""
        model = self.bench.problem.model
        sizes = [self.micro_batch_size * model.output_bytes_per_row(layer) for layer in range(len(model.layers))]
        rates = [exchange(a, b, self.bench.problem.setting) for a, b in pairwise(self.devices)]
        latency, per_byte = np.array(rates).reshape(-1, 2).T
        found: Array = latency[:, None] + per_byte[:, None] * np.array([0.0, *sizes])[None, :]
        return found

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Weights of a stage's steady micro-batches beside its last one: not at all, on average, as the longest stage."""
        repeats = self.micro_batches - 1
        if len(self.devices) == 1 or not repeats:
            return (float(repeats),)
        return (0.0, repeats / len(self.devices), float(repeats))

    def solution(self, ends: Ends) -> PipelineSolution | None:
        """Every stage's strategies under memory, and Eq. 8; None where a stage does not fit."""
        if ends not in self._solutions:
            self._solutions[ends] = self._solve(ends)
        return self._solutions[ends]

    def _solve(self, ends: Ends) -> PipelineSolution | None:
        options = []
        for stage, (first, end) in zip(self.stages, pairwise((0, *ends)), strict=True):
            options.append(self._options(stage, first, end))
            if not options[-1]:
                return None
        best: PipelineSolution | None = None
        for limit in sorted({solution.steady_seconds for stage in options for solution in stage}):
            within = [[s for s in stage if s.steady_seconds <= limit] for stage in options]
            if not all(within):
                continue
            chosen = tuple(min(stage, key=lambda s: s.last_seconds) for stage in within)
            found = self._joined(ends, chosen)
            if best is None or found.seconds < best.seconds:
                best = found
        return best

    def _joined(self, ends: Ends, stages: tuple[StageSolution, ...]) -> PipelineSolution:
        sent = sum(float(self.exchange_seconds[number, end]) for number, end in enumerate(ends[:-1]))
        longest = max(stage.steady_seconds for stage in stages)
        last = sum(stage.last_seconds for stage in stages)
        return PipelineSolution(ends, stages, (self.micro_batches - 1) * longest + last + sent)

    def variants(self, solution: PipelineSolution) -> list[PipelineSolution]:
        """The solution, and others of its partition: every stage at one weight of its steady micro-batches."""
        ends = solution.ends
        options = [
            self._options(stage, first, end)
            for stage, (first, end) in zip(self.stages, pairwise((0, *ends)), strict=True)
        ]
        ways = range(max(len(stage) for stage in options))
        others = (self._joined(ends, tuple(stage[min(way, len(stage) - 1)] for stage in options)) for way in ways)
        return list(dict.fromkeys((solution, *others)))

    def _options(self, stage: StageTable, first: int, end: int) -> list[StageSolution]:
        """The stage at every weight; what is best at the least and at the largest one is best at those between."""
        least, *between, largest = self.weights if len(self.weights) > 1 else self.weights * 2
        found = [self.bench.solve(stage, first, end, weight) for weight in (least, largest)]
        if found[0] != found[1]:
            found += [self.bench.solve(stage, first, end, weight) for weight in between]
        return [solution for solution in found if solution is not None]

    def plan(self, solution: PipelineSolution) -> Plan:
        """The plan of a solution; neighbouring layers with one strategy become one run."""
        problem = self.bench.problem
        stages = tuple(
            Stage(devices, group.layer_runs(first, stage.strategies))
            for devices, group, first, stage in zip(
                self.devices, self.groups, (0, *solution.ends), solution.stages, strict=False
            )
        )
        pipeline = Pipeline(self.micro_batches, self.micro_batch_size, stages)
        return Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))
