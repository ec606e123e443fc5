"""Intra-operator pass of §4 over a submesh's logical mesh shapes, mapped to the nearest runnable degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trainwright.cost.layer_sums import Array
from trainwright.cost.operators.meshes import mesh_of
from trainwright.cost.stage_tables import StageSpans, StageTables
from trainwright.plan import LayerRun, divisors, split_rows
from trainwright.search.alpa.intra import IntraOperator, LogicalMesh, SpanCosts
from trainwright.search.alpa.intra.nearest_degrees import NearestDegrees
from trainwright.search.alpa.stage_candidates import StageStrategy, SubmeshOptions, concatenate_options
from trainwright.search.alpa.submeshes import RepresentativeDevices, Submesh
from trainwright.search.degrees import open_strategies
from trainwright.search.problem import Problem
from trainwright.strategy import Strategy


@dataclass
class OperatorOptions:
    """Intra-operator pass by operators for one problem, caching what submeshes share."""

    problem: Problem
    spans: StageSpans
    devices: RepresentativeDevices
    _meshes: dict[Submesh, tuple[LogicalMesh, ...]] = field(default_factory=dict)

    @cached_property
    def _stages(self) -> StageTables:
        return StageTables(self.problem.cost_context, self.spans)

    @cached_property
    def _intra(self) -> IntraOperator:
        return IntraOperator(self.problem)

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> SubmeshOptions | None:
        """Return the options of every logical mesh shape at every memory price."""
        del micro_batches  # the intra-operator pass derives it from `rows`
        options_of_meshes = [
            self._submesh_options(costs, mesh, rows)
            for mesh in self.meshes(submesh)
            for costs in self._intra.options(mesh, rows)
        ]
        return concatenate_options(options_of_meshes)

    def meshes(self, submesh: Submesh) -> tuple[LogicalMesh, ...]:
        """Return logical shapes (n_l, m_l) whose second dimension divides the submesh's devices per node.

        In others one dimension alone would span whole nodes and a part of one; sharding over both dimensions (S01) is
        possible in every shape.
        """
        if submesh not in self._meshes:
            self._meshes[submesh] = tuple(self._logical_meshes(submesh))
        return self._meshes[submesh]

    def _logical_meshes(self, submesh: Submesh) -> Iterator[LogicalMesh]:
        nodes = tuple(device.node for device in self.devices.devices_of(submesh))
        inner = submesh.width or int(np.gcd.reduce([block.width for block, _ in submesh.parts]))
        for within in divisors(inner):
            shape = (submesh.size // within, within)
            if within == 1 and 1 < submesh.size == inner:
                continue  # equals (1, m)
            yield mesh_of(nodes, shape, self.problem.cost_context)

    def _submesh_options(self, costs: SpanCosts, mesh: LogicalMesh, rows: int) -> SubmeshOptions:
        """Return one option by clusters, adding the memory of the runtime, stage boundaries and the workspace."""
        context = self.problem.cost_context
        share, buffers = -(-rows // mesh.shape[0]), self._stages.boundary_row_bytes
        workspace = self._stages.workspace_bytes(1, rows) / mesh.devices
        once = share * buffers.once + workspace + context.runtime.constant_bytes_of(*mesh.accelerators)

        def strategy(option: int, first: int, end: int) -> StageStrategy:
            del option  # each table has a single option
            sharding = costs.sharding(self.spans.cuts[first], self.spans.cuts[end])
            runs, is_unchanged = self._layer_runs(sharding.degrees, mesh, rows)
            is_exact = sharding.exact and is_unchanged
            return StageStrategy(runs, is_exact, None if is_exact else sharding.specs)

        return SubmeshOptions(
            self._by_clusters(costs.seconds),
            self._by_clusters(costs.iteration_seconds),
            self._by_clusters(costs.state_bytes, once),
            self._by_clusters(costs.activation_bytes, share * buffers.per_micro_batch),
            np.array([1.0 if context.runtime.splits_boundaries else max(mesh.devices / rows, 1.0)]),
            strategy,
        )

    def _by_clusters(self, values: Array, added: Array | float = 0.0) -> Array:
        """Return `[1, first, end]` by clusters of `[layer, end]` values plus those of stages; infinite if no layer lies between."""
        return self.spans.grid(values[self.spans.layers] + added, np.inf)[None]

    def _layer_runs(
        self, degrees: Sequence[NearestDegrees], mesh: LogicalMesh, rows: int
    ) -> tuple[tuple[LayerRun, ...], bool]:
        """Return a stage's runnable layer runs, and whether their degrees equal the given ones; empty if none can run."""
        open_here = self._feasible_tensor_degrees(mesh, rows)
        if not open_here:
            return (), False
        tensors = self._nearest_tensor_degrees(degrees, open_here)
        runs: list[LayerRun] = []
        for layer_degrees, tensor in zip(degrees, tensors, strict=True):
            data = mesh.devices // tensor
            run = LayerRun(
                layer_degrees.first,
                layer_degrees.count,
                Strategy(tensor, data, layer_degrees.order, layer_degrees.sharding),
                split_rows(rows, data),
            )
            if runs and replace(runs[-1], first=run.first, count=run.count) == run:
                before = runs.pop()
                run = replace(before, count=before.count + run.count)
            runs.append(run)
        return tuple(runs), tensors == [given.tensor for given in degrees]

    def _nearest_tensor_degrees(self, degrees: Sequence[NearestDegrees], open_here: Sequence[int]) -> list[int]:
        """Return the nearest allowed tensor degree of each run.

        Layers that tensor parallelism does not shard (often embeddings and heads) would be replicated on every tensor
        rank, so they take a neighbour's degree.
        """
        nearest: list[int | None] = [
            min(open_here, key=lambda degree: (abs(math.log(degree / layer_degrees.tensor)), degree))
            if self._is_divided(layer_degrees)
            else None
            for layer_degrees in degrees
        ]
        open_degrees = [tensor for tensor in nearest if tensor is not None]
        if not open_degrees:
            return [min(open_here)] * len(degrees)
        tensors: list[int] = []
        for tensor in nearest:
            tensors.append(tensor if tensor is not None else tensors[-1] if tensors else open_degrees[0])
        return tensors

    def _is_divided(self, run: NearestDegrees) -> bool:
        counts = self.problem.cost_context.kind_counts(run.first, run.end)
        return all(self.problem.cost_context.is_tensor_sharded(kind, run.tensor) for kind, _ in counts)

    def _feasible_tensor_degrees(self, mesh: LogicalMesh, rows: int) -> list[int]:
        """Return tensor degrees that limits, profiles and rows allow on the mesh."""
        open_here = open_strategies(self.problem, mesh.devices, mesh.accelerators)
        return [strategy.tensor for strategy in open_here if strategy.data <= rows]
