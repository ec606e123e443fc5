"""The intra-operator pass of §4 over the logical mesh shapes of a submesh, as the inter-operator pass asks it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trainwright.cost import memory
from trainwright.cost.collectives import Collective
from trainwright.operator_specs import Degrees
from trainwright.plan import LayerRun, even_rows
from trainwright.search.alpa.intra import IntraOperator, LogicalMesh, SpanCosts
from trainwright.search.alpa.layer_spans import LayerSpans
from trainwright.search.alpa.mesh_devices import MeshDevices
from trainwright.search.alpa.options import Options, StageStrategy, joined
from trainwright.search.alpa.submesh import Submesh
from trainwright.search.degrees import divisors, profiled, tensor_degrees
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array

_LARGE_BYTES = 2**26
"""Collectives are taken to go the way that a message of this size goes."""


@dataclass
class OperatorOptions:
    """Tables of one problem; what submeshes share is computed once."""

    problem: Problem
    spans: LayerSpans
    devices: MeshDevices
    _meshes: dict[Submesh, tuple[LogicalMesh, ...]] = field(default_factory=dict)

    @cached_property
    def _intra(self) -> IntraOperator:
        return IntraOperator(self.problem)

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> Options | None:
        """Every logical mesh shape under every weight of memory."""
        del micro_batches  # follows from the rows
        found = [
            self._options(costs, mesh, rows)
            for mesh in self.meshes(submesh)
            for costs in self._intra.options(mesh, rows)
        ]
        return joined(found)

    def meshes(self, submesh: Submesh) -> tuple[LogicalMesh, ...]:
        """The logical shapes (n_l, m_l) whose second dimension divides the submesh's part of a node.

        In others a dimension would by itself span whole nodes and part of one; both dimensions together (S01) are open
        in every shape.
        """
        if submesh not in self._meshes:
            self._meshes[submesh] = tuple(self._logical(submesh))
        return self._meshes[submesh]

    def _logical(self, submesh: Submesh) -> Iterator[LogicalMesh]:
        inner = submesh.width or int(np.gcd.reduce([block.width for block, _ in submesh.parts]))
        for within in divisors(inner):
            shape = (submesh.size // within, within)
            if within == 1 and 1 < submesh.size == inner:
                continue  # the same line as (1, m)
            near, far = self.devices.collectives(submesh, within)
            (far_latency, far_pace), (near_latency, near_pace) = _rates(far, shape[0]), _rates(near, shape[1])
            yield LogicalMesh(submesh.accelerators, shape, (far_latency, near_latency), (far_pace, near_pace))

    def _options(self, costs: SpanCosts, mesh: LogicalMesh, rows: int) -> Options:
        """By clusters, with what the runtime, boundaries and the loss need beside the operators."""
        bounds, model, setting = self.spans.bounds, self.problem.model, self.problem.setting
        share = -(-rows // mesh.shape[0])
        sent = share * np.array([0.0, *(model.output_bytes_per_row(layer) for layer in range(len(model.layers)))])
        entering, leaving = sent[bounds][:, None], np.append(sent[:-1], 0.0)[bounds][None, :]
        once = memory.RECEIVED_AHEAD * (entering + leaving) + setting.runtime.constant_bytes
        once[:, -1] += memory.loss_bytes(setting, 1, rows) / mesh.devices

        def strategy(option: int, first: int, end: int) -> StageStrategy:
            del option  # there is but one
            specs = costs.strategy(int(bounds[first]), int(bounds[end]))
            runs, kept = self._runs(specs.degrees, mesh, rows)
            is_exact = specs.exact and kept
            return StageStrategy(runs, is_exact, None if is_exact else specs)

        return Options(
            self._by_clusters(costs.seconds),
            self._by_clusters(costs.iteration_seconds),
            self._by_clusters(costs.state_bytes) + once,
            self._by_clusters(costs.activation_bytes) + leaving,
            np.array([max(mesh.devices / rows, 1.0)]),
            strategy,
        )

    def _by_clusters(self, values: Array) -> Array:
        """[1, first, end] of [layer, end]; infinite where there is no layer between."""
        whole = np.concatenate([values, np.full((1, values.shape[1]), np.inf)])
        found: Array = np.where(self.spans.is_stage, self.spans.chosen(whole), np.inf)[None]
        return found

    def _runs(self, degrees: Sequence[Degrees], mesh: LogicalMesh, rows: int) -> tuple[tuple[LayerRun, ...], bool]:
        """The runs of a stage, and whether they have just these degrees: else the nearest that could run, if any."""
        open_here = self._open(mesh, rows)
        if not open_here:
            return (), False
        tensors = self._tensors(degrees, open_here)
        found: list[LayerRun] = []
        for one, tensor in zip(degrees, tensors, strict=True):
            data = mesh.devices // tensor
            run = LayerRun(one.first, one.count, tensor, data, even_rows(rows, data), one.order, one.sharding)
            if found and replace(found[-1], first=run.first, count=run.count) == run:
                before = found.pop()
                run = replace(before, count=before.count + run.count)
            found.append(run)
        return tuple(found), tensors == [one.tensor for one in degrees]

    def _tensors(self, degrees: Sequence[Degrees], open_here: Sequence[int]) -> list[int]:
        """The nearest open tensor degree of each run.

        Layers that no tensor degree divides (embeddings and heads, often) every tensor rank would compute whole: where
        their operators are divided all the same, they take the degree of a neighbour.
        """
        nearest: list[int | None] = [
            min(open_here, key=lambda degree: (abs(math.log(degree / one.tensor)), degree))
            if self._is_divided(one)
            else None
            for one in degrees
        ]
        known = [tensor for tensor in nearest if tensor is not None]
        if not known:
            return [min(open_here)] * len(degrees)
        found: list[int] = []
        for tensor in nearest:
            found.append(tensor if tensor is not None else found[-1] if found else known[0])
        return found

    def _is_divided(self, run: Degrees) -> bool:
        counts = self.problem.setting.kind_counts(run.first, run.end)
        return all(self.problem.setting.divides(kind, run.tensor) for kind, _ in counts)

    def _open(self, mesh: LogicalMesh, rows: int) -> list[int]:
        """Tensor degrees that the limits, the profiles and the rows allow on so many devices."""
        problem, most = self.problem, min(rows, self.problem.limits.max_data_degree or rows)
        return [
            tensor
            for tensor in tensor_degrees(problem.model, mesh.devices, problem.limits.max_tensor_degree)
            if mesh.devices // tensor <= most and profiled(problem.model, problem.profiles, mesh.accelerators, tensor)
        ]


def _rates(all_reduce: Collective, members: int) -> tuple[float, float]:
    """α and β of one step of the ring that takes as long: an all-reduce has 2 (n - 1) steps of 1/n of the message."""
    if members == 1:
        return 0.0, 0.0
    way = all_reduce.way(_LARGE_BYTES)
    steps, ratio = 2 * (members - 1), all_reduce.ratios.all_reduce
    return ratio * way.latency_seconds / steps, ratio * way.seconds_per_byte * members / steps
