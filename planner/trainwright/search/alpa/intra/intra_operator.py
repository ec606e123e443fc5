"""Entry point of the intra-operator pass: costs of all spans of layers on a logical mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from trainwright.cost.layer_sums import Array
from trainwright.cost.operators.algorithm_costs import LayerCompute, LayerIlpCosts, MeshCosts, Rewriting
from trainwright.cost.operators.integer_program import (
    AssignmentCost,
    EdgeCosts,
    IntegerProgram,
    NodeChoices,
    WeightedObjective,
)
from trainwright.cost.operators.layer_specs import LayerAssignment, layer_operators
from trainwright.cost.operators.operator_graph import OperatorGraph
from trainwright.cost.operators.parallel_algorithms import AlgorithmSpace, GraphAlgorithms, input_layouts
from trainwright.cost.operators.sharding_specs import LogicalMesh
from trainwright.cost.operators.shared_weights import largest_shared_weight, shared_weight_overcount
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.operator_shardings import LayerSpecs, SpanSpecs
from trainwright.search.alpa.intra.ilp import solve_ilp
from trainwright.search.alpa.intra.layer_chain_dp import LayerBoundary, LayerTable
from trainwright.search.alpa.intra.nearest_degrees import DegreesBuilder, SpanSharding, merge_equal_runs
from trainwright.search.alpa.intra.span_costs import (
    IN_FLIGHT_COUNTS,
    MIXED_SHARES,
    PRICE_RATIOS,
    RunCosts,
    SpanCosts,
    memory_prices,
)
from trainwright.search.problem import Problem


@dataclass(frozen=True)
class SpanIlp:
    """Integer program of consecutive layers.

    Attributes:
        starts: index of each layer's first node.
    """

    programme: IntegerProgram
    starts: tuple[int, ...]

    @classmethod
    def of(cls, pricings: Sequence[LayerIlpCosts]) -> SpanIlp:
        """Join layers so that a tensor has the same layout where it leaves one layer and where it enters the next."""
        nodes: list[NodeChoices] = []
        edges: list[EdgeCosts] = []
        starts: list[int] = []
        before: LayerIlpCosts | None = None
        for pricing in pricings:
            programme, start = pricing.programme(), len(nodes)
            edges += programme.offset_edges(start)
            if before is not None:
                graph = before.algorithms.graph
                for position, source in enumerate(graph.wired.outputs[: pricing.algorithms.graph.wired.inputs]):
                    left = before.algorithms.output_layouts(source)
                    taken = pricing.algorithms.inputs[position]
                    differs = np.where(left[:, None] == taken[None, :], 0.0, np.inf)
                    edges.append(EdgeCosts(starts[-1] + graph.node_of[source], start + position, differs))
            nodes += programme.nodes
            starts.append(start)
            before = pricing
        return cls(IntegerProgram(tuple(nodes), tuple(edges)), tuple(starts))

    def solve(
        self, goal: WeightedObjective, memory_bytes: float = np.inf, limit_seconds: float = 60.0
    ) -> tuple[tuple[tuple[tuple[int, int], ...], ...], AssignmentCost] | None:
        """Return (weight mode, algorithm) of every layer's nodes with their cost, None if memory never suffices."""
        solution = solve_ilp(self.programme, goal, memory_bytes=memory_bytes, limit_seconds=limit_seconds)
        if solution is None:
            return None
        ends = (*self.starts[1:], len(solution.assignment))
        layers = tuple(solution.assignment[start:end] for start, end in zip(self.starts, ends, strict=True))
        return layers, solution.totals


@dataclass(frozen=True)
class _MeshAlgorithms:
    """Algorithms of a layer kind on a mesh shape, valid for all row counts with the same divisibility."""

    algorithms: GraphAlgorithms
    boundary: LayerBoundary


@dataclass
class IntraOperator:
    """Costs of runs of layers on logical meshes, caching what meshes and row counts share.

    Attributes:
        divides_sequences: whether the sequence axis may be sharded, which Alpa's evaluated plans do not.
        rewriting: all-reduces that become reduce-scatters and all-gathers (paper §4.2).
    """

    problem: Problem
    divides_sequences: bool = False
    rewriting: Rewriting = field(default_factory=Rewriting)
    _graphs: dict[str, OperatorGraph] = field(default_factory=dict)
    _shaped: dict[tuple[object, ...], _MeshAlgorithms] = field(default_factory=dict)
    _prices: dict[LogicalMesh, MeshCosts] = field(default_factory=dict)
    _computes: dict[tuple[str, tuple[str, ...]], LayerCompute] = field(default_factory=dict)

    def spans(self, mesh: LogicalMesh, rows: int) -> SpanCosts:
        """Return costs of every run of layers under its fastest assignment, for `rows` rows over the whole mesh."""
        return self.costs(mesh, rows, [self.goal(mesh, rows)])[0]

    def options(self, mesh: LogicalMesh, rows: int) -> tuple[SpanCosts, ...]:
        """Return costs of every run under several objectives (Algorithm 1's `opt`), from fastest to least memory.

        After them come mixtures: runs whose first layers follow one objective and the others the next.
        """
        goals = [self.goal(mesh, rows, ratio, count) for count in IN_FLIGHT_COUNTS for ratio in PRICE_RATIOS]
        tables = self._tables(mesh, rows, goals)
        ladders = memory_prices([tables[name] for name in self.problem.model.layers])
        kept = list(dict.fromkeys(number for ladder in ladders for number in ladder))
        steps = dict.fromkeys(step for ladder in ladders for step in pairwise(ladder))
        runs = self._runs(mesh, rows, {name: table.for_goals(kept) for name, table in tables.items()})
        return runs.with_mixtures([(kept.index(price), kept.index(other)) for price, other in steps], MIXED_SHARES)

    def goal(
        self, mesh: LogicalMesh, rows: int, memory_price_ratio: float = 0.0, in_flight: int = 1
    ) -> WeightedObjective:
        """Return the objective at a memory price relative to `PRICE_RATIOS`' unit.

        Raises:
            ValueError: `rows` is below 1.
        """
        if rows < 1:
            raise ValueError(f"a micro-batch needs at least 1 row, got {rows}")
        batches = max(self.problem.global_batch_size // rows, 1)
        size = min(self._memory_bytes(name) for name in mesh.accelerators)
        price = memory_price_ratio * batches * self._balanced_compute_seconds(mesh, rows) / size
        return WeightedObjective(batches, in_flight, price)

    def costs(self, mesh: LogicalMesh, rows: int, goals: Sequence[WeightedObjective]) -> tuple[SpanCosts, ...]:
        """Return costs of every run of layers under the best assignment for each objective.

        Raises:
            ValueError: An accelerator has no profiles.
        """
        return self._runs(mesh, rows, self._tables(mesh, rows, goals)).by_goal()

    def _runs(self, mesh: LogicalMesh, rows: int, tables: dict[str, LayerTable]) -> RunCosts:
        def described(first: int, assignments: Sequence[LayerAssignment]) -> SpanSharding:
            return self.describe(mesh, rows, first, assignments)

        return RunCosts([tables[name] for name in self.problem.model.layers], self._shared_weight_overcount, described)

    def _tables(self, mesh: LogicalMesh, rows: int, goals: Sequence[WeightedObjective]) -> dict[str, LayerTable]:
        pricings = {name: self._pricing(name, mesh, rows) for name in dict.fromkeys(self.problem.model.layers)}
        return {
            name: LayerTable.of(
                pricing.programme(),
                self._mesh_algorithms(name, mesh, rows).boundary,
                goals,
                self._shared_weight_costs(pricing),
            )
            for name, pricing in pricings.items()
        }

    def describe(
        self, mesh: LogicalMesh, rows: int, first: int, assignments: Sequence[LayerAssignment]
    ) -> SpanSharding:
        """Export consecutive layers from `first` on, given each node's (weight mode, algorithm)."""
        names, layers, degrees = self.problem.model.layers[first : first + len(assignments)], [], []
        layer = first
        for (name, assignment), equal in groupby(zip(names, assignments, strict=True)):
            count, kind = len(list(equal)), self.problem.model.kind(name)
            divides = self.problem.cost_context.divided_at(mesh.devices).divides_vocabulary(kind)
            algorithms = self._mesh_algorithms(name, mesh, rows).algorithms
            layers.append(LayerSpecs(layer, name, layer_operators(algorithms, self.rewriting, assignment), count))
            builder = DegreesBuilder(algorithms, mesh.shape, self.rewriting, divides)
            degrees.append(builder.degrees(layer, count, assignment))
            layer += count
        return SpanSharding(SpanSpecs(mesh.shape, tuple(layers)), merge_equal_runs(degrees))

    def solve_exactly(  # noqa: PLR0913 - a run of layers, where it runs and what it may hold
        self, mesh: LogicalMesh, rows: int, first: int, end: int, *, goal: WeightedObjective, memory_bytes: float
    ) -> tuple[SpanSharding, AssignmentCost] | None:
        """Solve the layers `first … end - 1` as one integer program within a memory limit, None if nothing fits.

        It takes a solver seconds where `costs` takes milliseconds for all runs, but finds assignments between those
        that memory prices reach. A weight shared by several layers is counted at each of them.

        Raises:
            ValueError: The solver does not finish in time.
        """
        run = SpanIlp.of([self.pricing(layer, mesh, rows) for layer in range(first, end)])
        run_solution = run.solve(goal, memory_bytes)
        return None if run_solution is None else (self.describe(mesh, rows, first, run_solution[0]), run_solution[1])

    def pricing(self, layer: int, mesh: LogicalMesh, rows: int) -> LayerIlpCosts:
        """Return the costs of one layer's integer program."""
        return self._pricing(self.problem.model.layers[layer], mesh, rows)

    def _pricing(self, name: str, mesh: LogicalMesh, rows: int) -> LayerIlpCosts:
        if mesh not in self._prices:
            self._prices[mesh] = MeshCosts(mesh, self.problem.cost_context, self.rewriting)
        shaped = self._mesh_algorithms(name, mesh, rows)
        return LayerIlpCosts(self._prices[mesh], shaped.algorithms, self._compute(name, mesh.accelerators), rows)

    def _compute(self, name: str, accelerators: tuple[str, ...]) -> LayerCompute:
        key = (name, accelerators)
        if key not in self._computes:
            kind, operations = self.problem.model.kind(name), self._graph(name).operations
            self._computes[key] = LayerCompute(self.problem.cost_context, kind, operations, accelerators)
        return self._computes[key]

    def _mesh_algorithms(self, name: str, mesh: LogicalMesh, rows: int) -> _MeshAlgorithms:
        space = AlgorithmSpace(mesh.shape, rows, self.divides_sequences)
        key = (name, mesh.shape, space.batch_fits())
        if key not in self._shaped:
            algorithms = GraphAlgorithms.of(self._graph(name), space, self._entering_width[name])
            boundary = LayerBoundary.of(algorithms, input_layouts(space, 0))
            self._shaped[key] = _MeshAlgorithms(algorithms, boundary)
        return self._shaped[key]

    def _graph(self, name: str) -> OperatorGraph:
        if name not in self._graphs:
            model = self.problem.model
            self._graphs[name] = OperatorGraph.of(wire_layer(model, model.kind(name)))
        return self._graphs[name]

    @cached_property
    def _entering_width(self) -> dict[str, int]:
        """Return by layer kind the common divisor of the last axis of all tensors that enter such a layer."""
        model, widths = self.problem.model, dict.fromkeys(self.problem.model.layers, 0)
        for before, name in zip(model.layers, model.layers[1:], strict=False):
            last = model.kind(before).operators[-1]
            widths[name] = math.gcd(widths[name], round(last.output_elements_per_row / last.positions_per_row))
        return widths

    def _memory_bytes(self, accelerator: str) -> int:
        accelerators = self.problem.cost_context.cluster.accelerators
        return next(each.memory_bytes for each in accelerators if each.name == accelerator)

    def _balanced_compute_seconds(self, mesh: LogicalMesh, rows: int) -> float:
        """Return compute seconds of a micro-batch if all devices shared it evenly."""
        computes = [self._compute(name, mesh.accelerators) for name in self.problem.model.layers]
        # A layer profiled only at higher degrees scales by its degree, precisely enough for a price.
        return (
            sum(
                compute.layer_seconds(rows, compute.min_profiled_degree) * compute.min_profiled_degree
                for compute in computes
            )
            / mesh.devices
        )

    def _shared_weight_costs(self, pricing: LayerIlpCosts) -> tuple[int, Array] | None:
        """Return the node that holds the model's largest shared weight, with its iteration seconds and state bytes."""
        kind = pricing.compute.kind
        if kind.shared_weight is None or kind.shared_weight != largest_shared_weight(self.problem.model):
            return None
        return pricing.costs_of_weight(kind.shared_parameters)

    @cached_property
    def _shared_weight_overcount(self) -> Array:
        return shared_weight_overcount(self.problem.model)
