"""Galvatron: both searches as they stand, and one stage by the paper's table algorithm."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass

from galvatron_oracle import objective, table_algorithm
from rich.console import Console
from rich.table import Table

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.families import Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import Problem, run
from trainwright.search.galvatron.pipelines import Workbench
from trainwright.search.galvatron.stage_programme import assign
from trainwright.search.galvatron.tables import StageTable

TOP = 10
GRANULES = 64
"""Of the table's memory budget; the paper's hundreds would take minutes."""
PUBLISHED = {"8": "155 s", "16": "238 s"}
"""Fine-grained search of Llama-2 7B by the authors' public code, measured."""


@dataclass(frozen=True)
class Case:
    """What is searched."""

    name: str
    planner: str
    machines: dict[str, int]
    layers: int
    batch: int
    public: str = "-"

    def problem(self) -> Problem:
        """Llama-2 7B with so many layers, by estimated profiles."""
        cluster = cluster_of(self.machines)
        family = Llama(self.layers, 4096, 32, sequence_length=4096, vocabulary_size=32000)
        model = Model.of(family, Dtype.BFLOAT16)
        names = sorted(accelerator.name for accelerator in cluster.accelerators)
        tensors = [2**power for power in range(6)]
        profiles = estimate_profiles(model, names, tensor_degrees=tensors, rows=(1, 2, 4, 8))
        return Problem(cluster, model, profiles, self.batch)


CASES = (
    Case("Llama-2 7B, 8 GPUs", "galvatron-base", {"dgx-a100": 1}, 32, 64, PUBLISHED["8"]),
    Case("Llama-2 7B, 16 GPUs", "galvatron-base", {"dgx-a100": 2}, 32, 64, PUBLISHED["16"]),
    Case("Llama-2 7B, 8 GPUs, 40 GB", "galvatron-bmw", {"dgx-a100-320gb": 1}, 32, 64),
    Case("48 layers, 64 GPUs of two types", "galvatron-bmw", {"dgx-a100-320gb": 4, "p3.16xlarge": 4}, 48, 256),
)


def main() -> None:
    """Print CPU seconds on one core."""
    table = Table("search", "input", "CPU s", "public code", "best (estimated s)", title="Galvatron")
    for case in CASES:
        problem = case.problem()
        start = time.process_time()
        best = run(case.planner, problem, top=TOP)[0]
        spent = time.process_time() - start
        seconds = f"{best.estimate.iteration_seconds:.3f}  {best.plan.summary()}"
        table.add_row(case.planner, case.name, f"{spent:.2f}", case.public, seconds)
    console = Console()
    console.print(table)
    console.print(_against_the_table())
    console.print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB")


def _against_the_table() -> Table:
    """The whole model on one stage of eight devices: where memory binds, the plain table beside ours."""
    bench = Workbench(CASES[2].problem())
    table = Table(
        "rows", "ours, CPU s", "plain table", "ours, objective", "plain", title=f"one stage, {GRANULES} granules"
    )
    for cut in bench.pipelines():
        if len(cut.devices) > 1 or cut.micro_batch_size not in {8, 16}:
            continue
        stage: StageTable = cut.stages[0]
        choices = stage.choices(0, bench.sequence.layers, cut.weights[0], stage.group.budget_bytes)
        start = time.process_time()
        found = assign(choices)
        between = time.process_time()
        plain = table_algorithm(choices, GRANULES)
        end = time.process_time()
        ours = found.seconds if found else math.inf
        theirs = objective(choices, plain) if plain else math.inf
        rows = str(cut.micro_batch_size)
        table.add_row(rows, f"{between - start:.3f}", f"{end - between:.1f}", f"{ours:.4f}", f"{theirs:.4f}")
    return table
