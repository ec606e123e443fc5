"""Benchmark of Alpa: the whole search, its stage DP alone, and the paper's Algorithm 1 on the same tables."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass, field, replace

import numpy as np
from alpa_inter_oracle import Case, algorithm_1, choices_of
from rich.console import Console
from rich.table import Table

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cost.network import link_matrices, node_classes
from trainwright.cost.stage_tables import StageSpans
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import divisors
from trainwright.search import Problem, run
from trainwright.search.alpa.degree_options import DegreeOptions
from trainwright.search.alpa.inter_operator_dp import no_boundary_costs
from trainwright.search.alpa.layer_clusters import cluster_spans
from trainwright.search.alpa.micro_batch_search import MicroBatchSearch
from trainwright.search.alpa.stage_candidates import StageCandidates
from trainwright.search.alpa.submeshes import RepresentativeDevices, device_chains, node_blocks
from trainwright.search.alpa.t_max_search import TMaxSearch

GPT_39B = Gpt(48, 8192, 64, 1024, 51200)
"""Table 6 of the paper."""
BATCH = 1024
PUBLISHED_SECONDS, PUBLISHED_PROGRAMME_SECONDS = 2393, 1.65
"""Table 5 of the paper: GPT-39B on 64 GPUs, total and stage DP; most of the rest is compiling and profiling."""
EPSILON_SECONDS = 1e-6


@dataclass(frozen=True)
class Input:
    """Problem of one benchmark row. `reach_seconds`: target for the whole search."""

    name: str
    family: Gpt
    machines: dict[str, int]
    reach_seconds: float | None = None

    def problem(self) -> Problem:
        """Return the problem with estimated profiles."""
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
    """Stage candidates of a problem, by micro-batch size, in the first order of the device types."""

    problem: Problem
    spans: StageSpans = field(init=False)

    def __post_init__(self) -> None:
        self.spans = cluster_spans(self.problem.model)

    def edges(self, rows: int) -> tuple[StageCandidates, int]:
        """Return the stage candidates of micro-batches of `rows`, and the number of devices."""
        intra = DegreeOptions(self.problem, self.spans, RepresentativeDevices(self.problem))
        line = device_chains(node_blocks(self.problem))[0]
        found = MicroBatchSearch(self.problem, intra, rows, self.spans).stage_candidates(list(line.slots()))
        assert found is not None
        return found, line.size


def main() -> None:
    """Print CPU seconds on one core."""
    console = Console(width=150)
    table = Table("input", "whole search s", "reach s", "stage DPs s", "best (estimated s)", title="Alpa")
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
    """Return the problem with empty caches."""
    link_matrices.cache_clear()
    node_classes.cache_clear()
    return replace(problem, profiles=replace(problem.profiles), cluster=replace(problem.cluster))


def _programmes(problem: Problem) -> tuple[float, int]:
    """Return CPU seconds of the stage DP (Eq. 2–5) to the optimum of every micro-batch size, and the number of sizes.

    Excluded are the stage candidates.
    """
    tables, spent, count = Tables(problem), 0.0, 0
    for rows in divisors(BATCH):
        edges, devices = tables.edges(rows)
        clusters = tables.spans.piece_count
        started = time.process_time()
        TMaxSearch(edges, no_boundary_costs(clusters, devices), BATCH // rows, clusters).solve()
        spent += time.process_time() - started
        count += 1
    return spent, count


def _against_algorithm_1(console: Console) -> None:
    """Print CPU seconds of Algorithm 1 and of our stage DP on the same candidates; both must find the optimum of Eq. 2."""
    tables = Tables(SMALL.problem())
    clusters = tables.spans.piece_count
    table = Table("rows", "stages to choose from", "t_max", "Algorithm 1 s", "ours s", "times", "T (Eq. 2) s")
    for rows in (8, 64, 256):
        edges, devices = tables.edges(rows)
        batches = BATCH // rows
        choices = choices_of(edges)
        started = time.process_time()
        plain = algorithm_1(Case(choices, clusters, devices, batches, clusters), EPSILON_SECONDS)
        between = time.process_time()
        own = TMaxSearch(edges, no_boundary_costs(clusters, devices), batches, clusters).solve()[0].seconds(batches)
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
