"""Benchmark of Alpa's shardings of operators: what they gain over the degrees of plans, by the integer program's own costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cost.layer_sums import Array
from trainwright.cost.operators.algorithm_costs import LayerIlpCosts
from trainwright.cost.operators.integer_program import IntegerProgram, NodeChoices
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import Problem
from trainwright.search.alpa.intra import IntraOperator, LogicalMesh, WeightedObjective
from trainwright.search.alpa.intra.layer_chain_dp import LayerTable, SpecChain
from trainwright.search.alpa.intra.nearest_degrees import DegreesBuilder
from trainwright.search.alpa.intra.span_costs import IN_FLIGHT_COUNTS, PRICE_RATIOS
from trainwright.search.alpa.layer_clusters import cluster_spans
from trainwright.search.alpa.operator_options import OperatorOptions
from trainwright.search.alpa.submeshes import RepresentativeDevices, Submesh, node_blocks

BATCH = 64
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a micro-batch over the whole mesh; 1 and 2 occur as micro-batches of long pipelines."""

FAMILIES: dict[str, Family] = {
    "GPT 1.3B": Gpt(24, 2048, 32, 1024, 51200),
    "Llama 1.1B, 4 key-value heads": Llama(22, 2048, 32, 2048, 32000, key_value_heads=4),
    "BERT large": Bert(24, 1024, 16, 512, 30592),
    "T5 large": T5(24, 1024, 16),
    "ViT huge": Vit(32, 1280, 16),
    "Swin large": Swin((2, 2, 18, 2), 192, (6, 12, 24, 48), window_size=7),
    "TransGAN": TransGan((5, 4, 4), 1024, bottom_width=16),
    "Wide-ResNet 50, 8 times": WideResnet(50, 8),
    "mixture of 8 experts": Moe(12, 1024, 16, 1024, 32000, experts=8),
    "mixture of 8 wide experts": Moe(6, 1024, 16, 1024, 32000, experts=8, intermediate_size=16384),
}
MACHINES = {"V100": "p3.8xlarge", "T4": "g4dn.12xlarge"}
"""Machines with four devices of each accelerator."""
MESHES = {"1 × 4": (1, 4), "2 × 2": (2, 2)}
"""Four devices of one machine, and two of each of two."""


@dataclass(frozen=True)
class Comparison:
    """Least seconds of an iteration by operators and by degrees, of what fits into memory."""

    family: str
    mesh: str
    rows: int
    operators: float
    degrees: float

    @property
    def gain(self) -> float:
        """Return how much longer the best degrees take, as a fraction."""
        return self.degrees / self.operators - 1


@dataclass(frozen=True)
class DegreeTable:
    """Costs of one layer under the best degrees for each pair of layouts at its boundaries."""

    objective: Array
    parts: Array


@dataclass
class Degrees(IntraOperator):
    """Intra-operator pass whose layers each follow one tensor and data degree, and hold all their weights alike.

    Layers may differ, as in a plan, and the layouts between them are free: degrees are rather flattered.
    """

    def degree_tables(self, mesh: LogicalMesh, rows: int, goals: Sequence[WeightedObjective]) -> list[DegreeTable]:
        """Return the table of every layer."""
        kinds = {name: self._degree_table(name, mesh, rows, goals) for name in dict.fromkeys(self.problem.model.layers)}
        return [kinds[name] for name in self.problem.model.layers]

    def operator_tables(self, mesh: LogicalMesh, rows: int, goals: Sequence[WeightedObjective]) -> list[LayerTable]:
        """Return the table of every layer where each operator chooses for itself."""
        tables = self._tables(mesh, rows, goals)
        return [tables[name] for name in self.problem.model.layers]

    def _degree_table(self, name: str, mesh: LogicalMesh, rows: int, goals: Sequence[WeightedObjective]) -> DegreeTable:
        pricing = self._pricing(name, mesh, rows)
        boundary = self._mesh_algorithms(name, mesh, rows).boundary
        kind = self.problem.model.kind(name)
        builder = DegreesBuilder(
            pricing.algorithms,
            mesh.shape,
            self.rewriting,
            self.problem.cost_context.divided_at(mesh.devices).divides_vocabulary(kind),
        )
        programmes = list(_degree_programmes(pricing, builder, self.problem.model.max_tensor_degree))
        if not programmes:
            # Degrees would replicate the layer, which the integer program leaves out: it is granted its own choice.
            programmes = [pricing.programme()]
        tables = [LayerTable.of(each, boundary, goals, self._shared_weight_costs(pricing)) for each in programmes]
        objectives, parts = np.stack([t.objective for t in tables]), np.stack([t.parts for t in tables], axis=1)
        best = objectives.argmin(axis=0)
        return DegreeTable(objectives.min(axis=0), np.take_along_axis(parts, best[None, None], axis=1)[:, 0])


def _degree_programmes(
    pricing: LayerIlpCosts, builder: DegreesBuilder, max_tensor_degree: int
) -> Iterator[IntegerProgram]:
    """Yield the layer's program for every pair of degrees and both ways to hold weights, where any assignment remains."""
    plain, graph = pricing.programme(), pricing.algorithms.graph
    for batch in ((False, False), (True, False), (False, True), (True, True)):
        tensor = math.prod(size for size, is_batch in zip(builder.shape, batch, strict=True) if not is_batch)
        if max_tensor_degree % tensor:
            continue
        allowed = [
            np.array(
                [
                    all(
                        builder.expresses(
                            graph.operations[index], pricing.algorithms.operators[index].mappings[choice], batch
                        )
                        for index in node.operations
                        if node.leader is not None
                    )
                    for choice in range(count)
                ]
            )
            for node, count in zip(graph.nodes, pricing.algorithms.counts, strict=True)
        ]
        if not all(choices.any() for choices in allowed):
            continue
        for mode in (0, 1):
            nodes = [
                _restricted(
                    node, choices, mode, weighs=any(graph.operations[i].weight is not None for i in members.operations)
                )
                for node, choices, members in zip(plain.nodes, allowed, graph.nodes, strict=True)
            ]
            yield replace(plain, nodes=tuple(nodes))


def _restricted(node: NodeChoices, allowed: Array, mode: int, *, weighs: bool) -> NodeChoices:
    """Return the node with the allowed algorithms alone, and its weights held in one way where its algorithm has replicas."""
    seconds = np.where(allowed, node.seconds, np.inf)
    if weighs:
        has_both = np.isfinite(node.seconds[1])
        seconds[1 - mode] = np.where(has_both, np.inf, seconds[1 - mode])
    return replace(node, seconds=seconds)


def least_seconds(tables: Sequence[LayerTable] | Sequence[DegreeTable], batches: int, memory_bytes: float) -> float:
    """Return the least iteration seconds of all layers together that fit into memory, of all objectives; inf if none fits."""
    seconds, iteration, state, activation, *_ = SpecChain(tables).parts[:, :, 0, len(tables)]
    total = batches * seconds + iteration
    return float(np.where(state + activation <= memory_bytes, total, np.inf).min())


def comparisons(accelerator: str) -> Iterator[Comparison]:
    """Yield every family, mesh and number of rows that something fits."""
    for label, shape in MESHES.items():
        nodes, width = shape
        whole = cluster_of({MACHINES[accelerator]: nodes})
        cluster = replace(whole, nodes=tuple(replace(node, devices=width) for node in whole.nodes))
        (device,) = cluster.accelerators
        for name, family in FAMILIES.items():
            model = Model.of(family, Dtype.FLOAT16)
            degrees = [degree for degree in (1, 2, 4) if model.max_tensor_degree % degree == 0]
            profiles = estimate_profiles(model, [device.name], tensor_degrees=degrees, rows=ROWS)
            problem = Problem(cluster, model, profiles, BATCH)
            mesh = _mesh(problem, shape)
            intra = Degrees(problem)
            for rows in ROWS:
                goals = [intra.goal(mesh, rows, price, count) for count in IN_FLIGHT_COUNTS for price in PRICE_RATIOS]
                batches = BATCH // rows
                operators = least_seconds(intra.operator_tables(mesh, rows, goals), batches, device.memory_bytes)
                even = least_seconds(intra.degree_tables(mesh, rows, goals), batches, device.memory_bytes)
                if np.isfinite(operators):
                    yield Comparison(name, label, rows, operators, even)


def _mesh(problem: Problem, shape: tuple[int, int]) -> LogicalMesh:
    (block,) = node_blocks(problem)
    submesh = Submesh(((block, len(block.nodes)),))
    options = OperatorOptions(problem, cluster_spans(problem.model), RepresentativeDevices(problem))
    return next(mesh for mesh in options.meshes(submesh) if mesh.shape == shape)


def main() -> None:
    """Print by family and mesh how much longer the best degrees take, each at its best number of rows."""
    console = Console(width=150)
    gains: list[float] = []
    table = Table(
        "family", *(f"{name}, {mesh}" for name in MACHINES for mesh in MESHES), title="Degrees over operators"
    )
    cells: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for accelerator in MACHINES:
        every = list(comparisons(accelerator))
        gains += [each.gain for each in every]
        for mesh in MESHES:
            for name in FAMILIES:
                own = [each for each in every if (each.family, each.mesh) == (name, mesh)]
                cells[name].append(f"{_best_gain(own):.1%}" if own else "does not fit")
    for name, texts in cells.items():
        table.add_row(name, *texts)
    console.print(table)
    console.print(
        f"of {len(gains)} combinations of family, mesh and rows that fit, operators gain 3 % or more in "
        f"{sum(gain >= 0.03 for gain in gains)}; in {sum(np.isinf(gains))} of them no degrees fit\n"
    )


def _best_gain(comparisons: Sequence[Comparison]) -> float:
    """Return the gain where both sides choose their rows."""
    return min(each.degrees for each in comparisons) / min(each.operators for each in comparisons) - 1


if __name__ == "__main__":
    main()
