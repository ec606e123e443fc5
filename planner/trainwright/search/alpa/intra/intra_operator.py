"""The intra-operator pass as the inter-operator pass asks it: costs of all runs of layers on a logical mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.operator_specs import SpanSpecs
from trainwright.search.alpa.intra.algorithms import GraphAlgorithms, Space, input_layouts
from trainwright.search.alpa.intra.compute import LayerCompute
from trainwright.search.alpa.intra.description import Assignment, Describer, joined
from trainwright.search.alpa.intra.graph import OperatorGraph
from trainwright.search.alpa.intra.ladder import IN_FLIGHT, MIXED_SHARES, PRICE_RATIOS, ladders
from trainwright.search.alpa.intra.mesh import LogicalMesh
from trainwright.search.alpa.intra.pricing import LayerPricing, MeshPrices
from trainwright.search.alpa.intra.programme import Goal, Totals
from trainwright.search.alpa.intra.rewriting import Rewriting
from trainwright.search.alpa.intra.runs import Runs
from trainwright.search.alpa.intra.spans import SpanCosts
from trainwright.search.alpa.intra.tables import Boundary, LayerTable
from trainwright.search.alpa.intra.whole import WholeRun
from trainwright.search.alpa.intra.wiring import wired
from trainwright.search.protocol import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True)
class _Shaped:
    """A layer kind on a mesh shape, for rows that divide alike."""

    algorithms: GraphAlgorithms
    boundary: Boundary


@dataclass
class IntraOperator:
    """Costs of runs of layers on logical meshes; what meshes and row counts share is computed once.

    Attributes:
        sequences: whether positions of a sequence may be divided (Alpa's evaluated plans divide none, nor does our
            runtime).
        rewriting: which all-reduces become reduce-scatters and all-gathers (paper §4.2).
    """

    problem: Problem
    sequences: bool = False
    rewriting: Rewriting = field(default_factory=Rewriting)
    _graphs: dict[str, OperatorGraph] = field(default_factory=dict)
    _shaped: dict[tuple[object, ...], _Shaped] = field(default_factory=dict)
    _prices: dict[LogicalMesh, MeshPrices] = field(default_factory=dict)
    _computes: dict[tuple[str, tuple[str, ...]], LayerCompute] = field(default_factory=dict)

    def spans(self, mesh: LogicalMesh, rows: int) -> SpanCosts:
        """Every run of layers under its fastest assignment, for micro-batches of `rows` rows over the whole mesh."""
        return self.costs(mesh, rows, [self.goal(mesh, rows)])[0]

    def options(self, mesh: LogicalMesh, rows: int) -> tuple[SpanCosts, ...]:
        """Every run under several goals (Algorithm 1's `opt`): the fastest first, then such as hold less memory.

        Behind them, runs whose first layers follow one goal and whose others follow the next.
        """
        goals = [self.goal(mesh, rows, ratio, count) for count in IN_FLIGHT for ratio in PRICE_RATIOS]
        tables = self._tables(mesh, rows, goals)
        found = ladders([tables[name] for name in self.problem.model.layers])
        kept = list(dict.fromkeys(number for ladder in found for number in ladder))
        steps = dict.fromkeys(step for ladder in found for step in pairwise(ladder))
        runs = self._runs(mesh, rows, {name: table.only(kept) for name, table in tables.items()})
        return runs.mixed([(kept.index(one), kept.index(other)) for one, other in steps], MIXED_SHARES)

    def goal(self, mesh: LogicalMesh, rows: int, memory_price_ratio: float = 0.0, in_flight: int = 1) -> Goal:
        """Time, and memory at such a price: see `PRICE_RATIOS`. Raises ValueError for rows below 1."""
        if rows < 1:
            raise ValueError(f"a micro-batch needs at least 1 row, got {rows}")
        batches = max(self.problem.global_batch_size // rows, 1)
        size = min(self._memory_bytes(name) for name in mesh.accelerators)
        price = memory_price_ratio * batches * self._even_seconds(mesh, rows) / size
        return Goal(batches, in_flight, price)

    def costs(self, mesh: LogicalMesh, rows: int, goals: Sequence[Goal]) -> tuple[SpanCosts, ...]:
        """Every run of layers under the assignment that is best by each of these goals.

        Raises ValueError for an accelerator without profiles.
        """
        return self._runs(mesh, rows, self._tables(mesh, rows, goals)).plain()

    def _runs(self, mesh: LogicalMesh, rows: int, tables: dict[str, LayerTable]) -> Runs:
        def described(first: int, assignments: Sequence[Assignment]) -> SpanSpecs:
            return self.described(mesh, rows, first, assignments)

        return Runs([tables[name] for name in self.problem.model.layers], self._repeated, described)

    def _tables(self, mesh: LogicalMesh, rows: int, goals: Sequence[Goal]) -> dict[str, LayerTable]:
        pricings = {name: self._pricing(name, mesh, rows) for name in dict.fromkeys(self.problem.model.layers)}
        return {
            name: LayerTable.of(
                pricing.programme(), self._shape(name, mesh, rows).boundary, goals, self._shared(pricing)
            )
            for name, pricing in pricings.items()
        }

    def described(self, mesh: LogicalMesh, rows: int, first: int, assignments: Sequence[Assignment]) -> SpanSpecs:
        """The document of consecutive layers from `first` on, of which each node's (held, algorithm) is given."""
        names, layers, degrees = self.problem.model.layers, [], []
        for layer, assignment in enumerate(assignments, start=first):
            kind = self.problem.model.kind_of(layer)
            divides = not kind.is_tensor_parallel and self.problem.setting.divides(kind, mesh.devices)
            algorithms = self._shape(names[layer], mesh, rows).algorithms
            describer = Describer(algorithms, mesh.shape, self.rewriting, divides and mesh.devices > 1)
            layers.append(describer.layer(layer, kind.name, assignment))
            degrees.append(describer.degrees(layer, assignment))
        return SpanSpecs(mesh.shape, rows, tuple(layers), joined(degrees))

    def exact(  # noqa: PLR0913 - a run of layers, where it runs and what it may hold
        self, mesh: LogicalMesh, rows: int, first: int, end: int, *, goal: Goal, memory_bytes: float
    ) -> tuple[SpanSpecs, Totals] | None:
        """The layers `first … end - 1` by the integer programme as such, within a memory limit; None where none fits.

        It takes a solver seconds where `costs` takes milliseconds for all runs, and finds assignments between those
        that prices of memory reach. A weight that several layers share is counted at each of them. Raises ValueError
        where the solver does not end in time.
        """
        run = WholeRun.of([self.pricing(layer, mesh, rows) for layer in range(first, end)])
        found = run.solved(goal, memory_bytes)
        return None if found is None else (self.described(mesh, rows, first, found[0]), found[1])

    def pricing(self, layer: int, mesh: LogicalMesh, rows: int) -> LayerPricing:
        """What makes the integer programme of one layer."""
        return self._pricing(self.problem.model.layers[layer], mesh, rows)

    def _pricing(self, name: str, mesh: LogicalMesh, rows: int) -> LayerPricing:
        if mesh not in self._prices:
            self._prices[mesh] = MeshPrices(mesh, self.problem.setting, self.rewriting)
        shaped = self._shape(name, mesh, rows)
        return LayerPricing(self._prices[mesh], shaped.algorithms, self._compute(name, mesh.accelerators), rows)

    def _compute(self, name: str, accelerators: tuple[str, ...]) -> LayerCompute:
        key = (name, accelerators)
        if key not in self._computes:
            kind, operations = self.problem.model.kind(name), self._graph(name).operations
            self._computes[key] = LayerCompute(self.problem.setting, kind, operations, accelerators)
        return self._computes[key]

    def _shape(self, name: str, mesh: LogicalMesh, rows: int) -> _Shaped:
        space = Space(mesh.shape, rows, self.sequences)
        key = (name, mesh.shape, space.batch_fits())
        if key not in self._shaped:
            algorithms = GraphAlgorithms.of(self._graph(name), space, self._entering_width[name])
            boundary = Boundary.of(algorithms, input_layouts(space, 0))
            self._shaped[key] = _Shaped(algorithms, boundary)
        return self._shaped[key]

    def _graph(self, name: str) -> OperatorGraph:
        if name not in self._graphs:
            model = self.problem.model
            is_first = name == model.layers[0]
            layer = wired(model.kind(name), model.family, model.max_tensor_degree, is_first=is_first)
            self._graphs[name] = OperatorGraph.of(layer)
        return self._graphs[name]

    @cached_property
    def _entering_width(self) -> dict[str, int]:
        """By kind: what divides the last axis of whatever enters a layer of it."""
        model, found = self.problem.model, dict.fromkeys(self.problem.model.layers, 0)
        for before, name in zip(model.layers, model.layers[1:], strict=False):
            last = model.kind(before).operators[-1]
            found[name] = math.gcd(found[name], round(last.output_elements_per_row / last.positions_per_row))
        return found

    def _memory_bytes(self, accelerator: str) -> int:
        found = self.problem.setting.cluster.accelerators
        return next(one.memory_bytes for one in found if one.name == accelerator)

    def _even_seconds(self, mesh: LogicalMesh, rows: int) -> float:
        """Of a micro-batch's computation, were it shared evenly by all devices."""
        computes = [self._compute(name, mesh.accelerators) for name in self.problem.model.layers]
        # A layer that was profiled only divided takes as many times longer as it was divided, near enough for a price.
        return sum(one.layer_seconds(rows, one.least_degree) * one.least_degree for one in computes) / mesh.devices

    def _shared(self, pricing: LayerPricing) -> tuple[int, Array] | None:
        """The node that holds the model's largest shared weight, and that weight's state bytes there."""
        kind = pricing.compute.kind
        if kind.shared_weight is None or kind.shared_weight != self._shared_weight:
            return None
        return pricing.state_of(kind.shared_parameters)

    @cached_property
    def _shared_weight(self) -> str | None:
        kinds = [kind for kind in self.problem.model.kinds if kind.shared_weight is not None]
        return max(kinds, key=lambda kind: kind.shared_parameters).shared_weight if kinds else None

    @cached_property
    def _repeated(self) -> Array:
        """[first, end] what share of the largest shared weight's bytes a run counts too much: it is there once."""
        model = self.problem.model
        shared = [model.kind(name).shared_weight for name in model.layers]
        owns = [name is not None and name == self._shared_weight for name in shared]
        sums = np.concatenate([[0.0], np.cumsum(owns)])
        found: Array = 1 - 1 / np.maximum(sums[None, :] - sums[:-1, None], 1)
        return found
