"""Alpa: the whole search as it stands, its stage programme alone, and the paper's Algorithm 1 on the same tables."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass, field, replace

import numpy as np
from alpa_inter_oracle import Case, Choice, algorithm_1
from rich.console import Console
from rich.table import Table

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cost.links import links_of, node_classes
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import Problem, run
from trainwright.search.alpa.clustering import cluster_ends
from trainwright.search.alpa.crossings import no_crossings
from trainwright.search.alpa.degree_options import DegreeOptions
from trainwright.search.alpa.edges import Edges
from trainwright.search.alpa.layer_spans import LayerSpans
from trainwright.search.alpa.mesh_devices import MeshDevices
from trainwright.search.alpa.pipelines import MicroBatch
from trainwright.search.alpa.slicing import Slicing
from trainwright.search.alpa.submesh import blocks_of, lines_of
from trainwright.search.degrees import divisors

GPT_39B = Gpt(48, 8192, 64, 1024, 51200)
"""Table 6 of the paper."""
BATCH = 1024
PUBLISHED_SECONDS, PUBLISHED_PROGRAMME_SECONDS = 2393, 1.65
"""Table 5: GPT-39B on 64 GPUs, of which the stage programme; most of the rest is compiling and profiling."""
EPSILON_SECONDS = 1e-6


@dataclass(frozen=True)
class Input:
    """What is searched."""

    name: str
    family: Gpt
    machines: dict[str, int]
    reach_seconds: float | None = None

    def problem(self) -> Problem:
        """By estimated profiles."""
        model, cluster = Model.of(self.family, Dtype.FLOAT16), cluster_of(self.machines)
        names = [accelerator.name for accelerator in cluster.accelerators]
        tensors = [2**power for power in range(7) if self.family.heads % 2**power == 0]
        profiles = estimate_profiles(model, names, tensor_degrees=tensors, rows=(1, 2, 4, 8, 16, 32))
        return Problem(cluster, model, profiles, BATCH)


INPUTS = (
    Input("GPT 39B, 8 × 8 V100 16 GB", GPT_39B, {"p3.16xlarge": 8}, 20.0),
    Input("GPT 39B, 8 × 8 A100 40 GB", GPT_39B, {"dgx-a100-320gb": 8}, 20.0),
    Input("GPT 39B, 4 × 8 V100 and 4 × 8 A100", GPT_39B, {"p3.16xlarge": 4, "dgx-a100-320gb": 4}, 20.0),
    Input("GPT 39B, 64 × 8 V100 16 GB", GPT_39B, {"p3.16xlarge": 64}, 60.0),
)
SMALL = Input("GPT with 4 blocks, 2 × 4 V100", Gpt(4, 1024, 16, 1024, 51200), {"p3.8xlarge": 2})


@dataclass
class Tables:
    """The stages of one micro-batch size on one order of the devices' types."""

    problem: Problem
    spans: LayerSpans = field(init=False)

    def __post_init__(self) -> None:
        self.spans = LayerSpans(self.problem.model, cluster_ends(self.problem.model))

    def edges(self, rows: int) -> tuple[Edges, int]:
        """They, and the devices."""
        intra = DegreeOptions(self.problem, self.spans, MeshDevices(self.problem))
        line = lines_of(blocks_of(self.problem))[0]
        found = MicroBatch(self.problem, intra, rows, self.spans).edges_along(list(line.berths()))
        assert found is not None
        return found, line.size


def main() -> None:
    """Print CPU seconds on one core."""
    console = Console(width=150)
    table = Table("input", "whole search s", "reach s", "stage programmes s", "best (estimated s)", title="Alpa")
    for number, one in enumerate(INPUTS):
        problem = _afresh(one.problem())
        started = time.process_time()
        best = run("alpa", problem, top=1)[0]
        spent = time.process_time() - started
        programmes, count = _programmes(problem)
        published = f" (published {PUBLISHED_PROGRAMME_SECONDS})" if number == 0 else ""
        table.add_row(
            one.name,
            f"{spent:.2f}" + (f" (published {PUBLISHED_SECONDS:,})" if number == 0 else ""),
            f"{one.reach_seconds:.0f}",
            f"{programmes:.2f} for {count}{published}",
            f"{best.estimate.iteration_seconds:.2f}  {best.plan.summary()}",
        )
    console.print(table)
    _against_algorithm_1(console)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"peak memory of this process, all of the above: {peak:.0f} MiB\n")


def _afresh(problem: Problem) -> Problem:
    """The same problem without anything that was computed for it before."""
    links_of.cache_clear()
    node_classes.cache_clear()
    return replace(problem, profiles=replace(problem.profiles), cluster=replace(problem.cluster))


def _programmes(problem: Problem) -> tuple[float, int]:
    """Seconds of Eq. 2–5 for every micro-batch size, each to its optimum, tables apart; and how many they are."""
    tables, spent, count = Tables(problem), 0.0, 0
    for rows in divisors(BATCH):
        edges, devices = tables.edges(rows)
        clusters = len(tables.spans.ends)
        started = time.process_time()
        Slicing(edges, no_crossings(clusters, devices), BATCH // rows, clusters).solve()
        spent += time.process_time() - started
        count += 1
    return spent, count


def _against_algorithm_1(console: Console) -> None:
    """Both to the optimum of Eq. 2 on the same stages."""
    tables = Tables(SMALL.problem())
    clusters = len(tables.spans.ends)
    table = Table("rows", "stages to choose from", "t_max", "Algorithm 1 s", "ours s", "times", "T (Eq. 2) s")
    for rows in (8, 64, 256):
        edges, devices = tables.edges(rows)
        batches = BATCH // rows
        columns = (edges.first, edges.end, edges.size, edges.low, edges.high, edges.seconds, edges.most_stages)
        choices = [Choice(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        started = time.process_time()
        plain = algorithm_1(Case(choices, clusters, devices, batches, clusters), EPSILON_SECONDS)
        between = time.process_time()
        own = Slicing(edges, no_crossings(clusters, devices), batches, clusters).solve()[0].seconds(batches)
        ended = time.process_time()
        assert own <= plain * (1 + 1e-9), f"{own} is worse than {plain}"
        assert math.isclose(own, plain, rel_tol=1e-3), f"{own} is not {plain}"
        table.add_row(
            str(rows),
            f"{len(edges):,}",
            f"{len(np.unique(edges.seconds)):,}",
            f"{between - started:.2f}",
            f"{ended - between:.4f}",
            f"{(between - started) / max(ended - between, 1e-9):,.0f}",
            f"{own:.4f}",
        )
    console.print(f"{SMALL.name}, the paper's Algorithm 1 in plain loops (ε = 10⁻⁶ s) on the same tables:")
    console.print(table)
