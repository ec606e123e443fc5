"""Benchmark of Galvatron: both searches, and one stage by the paper's table algorithm."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass, replace

import numpy as np
from galvatron_oracle import objective, plain_micro_batches, plain_queue, table_algorithm
from rich.console import Console
from rich.table import Table

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.families import Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import Limits, Problem, run
from trainwright.search.galvatron.partition_search import SplitTables, memory_balanced_partition
from trainwright.search.galvatron.pipeline_solutions import GroupTablesCache
from trainwright.search.galvatron.search import adjusted_solutions
from trainwright.search.galvatron.strategy_dp import assign_strategies
from trainwright.search.galvatron.strategy_tables import StageTable

TOP = 10
GRANULES = 64
"""Steps of the table's memory budget; the paper's hundreds would take minutes."""
PLAIN_GRANULES = 24
SMALL = ({"p3.8xlarge": 1}, {"p3.8xlarge": 1, "g4dn.12xlarge": 1})
HEADROOMS = (0.0, 0.3, 0.5, 0.7)
"""Free shares of all memory, so that memory is increasingly binding."""
GROWTH = (2, 8, 32, 128, 512)
"""Numbers of nodes with eight devices."""
PUBLISHED = {"8": "155 s", "16": "238 s"}
"""Measured fine-grained search of Llama-2 7B by the authors' public code."""


@dataclass(frozen=True)
class Case:
    """Problem of one benchmark row."""

    name: str
    planner: str
    machines: dict[str, int]
    layers: int
    batch: int
    public: str = "-"

    def problem(self) -> Problem:
        """Return Llama-2 7B with `layers` layers and estimated profiles."""
        cluster = cluster_of(self.machines)
        family = Llama(self.layers, 4096, 32, sequence_length=4096, vocabulary_size=32000)
        model = Model.of(family, Dtype.FLOAT16)
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
    console.print(_growth())
    console.print(_against_the_table())
    console.print(_against_the_plain_procedure())
    console.print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB")


def _growth() -> str:
    """Report how the CPU seconds of `galvatron-base` grow with the devices, at a constant batch per device."""
    seconds = []
    for nodes in GROWTH:
        problem = Case("growth", "galvatron-base", {"dgx-a100": nodes}, 32, 8 * nodes).problem()
        start = time.process_time()
        run("galvatron-base", problem, top=TOP)
        seconds.append(time.process_time() - start)
    devices = [8 * nodes for nodes in GROWTH]
    exponent = np.polyfit(np.log(devices), np.log(seconds), 1)[0]
    shown = ", ".join(f"{count:,}: {spent:.2f}" for count, spent in zip(devices, seconds, strict=True))
    return f"galvatron-base, Llama-2 7B, CPU seconds by devices: {shown}; they grow as devices ^ {exponent:.2f}"


def _against_the_table() -> Table:
    """Compare the plain table with ours for the whole model on one stage of eight devices with binding memory."""
    bench = GroupTablesCache(CASES[2].problem())
    table = Table(
        "rows", "ours, CPU s", "plain table", "ours, objective", "plain", title=f"one stage, {GRANULES} granules"
    )
    for cut in bench.pipeline_splits():
        if len(cut.devices) > 1 or cut.micro_batch_size not in {8, 16}:
            continue
        stage: StageTable = cut.stages[0]
        choices = stage.choices(0, bench.sequence.layers, cut.steady_weights[0], stage.group.budget_bytes)
        start = time.process_time()
        found = assign_strategies(choices)
        between = time.process_time()
        plain = table_algorithm(choices, GRANULES)
        end = time.process_time()
        ours = found.seconds if found else math.inf
        theirs = objective(choices, plain) if plain else math.inf
        rows = str(cut.micro_batch_size)
        table.add_row(rows, f"{between - start:.3f}", f"{end - between:.1f}", f"{ours:.4f}", f"{theirs:.4f}")
    return table


def _against_the_plain_procedure() -> str:
    """Count where our search and the paper's (Algorithm 2's queue over the table algorithm) win, by pipeline split and problem."""
    wins = losses = cuts = whole_wins = whole_losses = problems = 0
    for machines in SMALL:
        for headroom in HEADROOMS:
            problem = replace(
                Case("small", "galvatron-bmw", machines, 4, 8).problem(), limits=Limits(memory_headroom_ratio=headroom)
            )
            tables = [SplitTables(cut) for cut in GroupTablesCache(problem).pipeline_splits()]
            plain_at_one_count, ours_at_all = math.inf, math.inf
            for table in tables:
                plain, ours = _plain_and_ours(table)
                losses += ours > plain * (1 + 1e-9)
                ours_at_all = min(ours_at_all, ours)
                if table.split.micro_batches == plain_micro_batches(8, len(table.split.devices)):
                    plain_at_one_count = min(plain_at_one_count, plain)
                cuts += math.isfinite(ours)
                wins += ours < plain * (1 - 1e-9)
            problems += math.isfinite(ours_at_all)
            whole_wins += ours_at_all < plain_at_one_count * (1 - 1e-9)
            whole_losses += ours_at_all > plain_at_one_count * (1 + 1e-9)
    return (
        f"The paper's plain procedure (Algorithm 2's queue, a table of {PLAIN_GRANULES} granules) on {cuts} cuts of small "
        f"problems: ours is better by Eq. 8 in {wins}, worse in {losses}. With one number of micro-batches for each pipeline "
        f"degree, 4 for each stage, on {problems} problems: ours is better in {whole_wins}, worse in {whole_losses}."
    )


def _plain_and_ours(table: SplitTables) -> tuple[float, float]:
    """Return the least Eq. 8 of one pipeline split by the paper's procedure and by ours."""
    ours = min((solution.seconds for solution in adjusted_solutions(table, math.inf)), default=math.inf)
    start = memory_balanced_partition(table.split)
    plain = plain_queue(table.split, start, table.time_balanced(), PLAIN_GRANULES) if start else math.inf
    return plain, ours
