"""Benchmark of AMP: our search against the paper's O(k L⁴) table, and its growth with the cluster."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from amp_oracle import objective, plain_table
from rich.console import Console
from rich.table import Table

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.network import link_matrices, node_classes
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import Problem, run
from trainwright.search.uniform.layer_partition import partition
from trainwright.search.uniform.placed_stages import PlacedStages
from trainwright.search.uniform.plan_space import UniformPlanSpace

T = TypeVar("T")

GPT2 = Gpt(24, 1024, 16, 1024, 52256)
"""GPT-2 as trained by AMP (§4.3)."""
TOP = 10
ORACLE_STEPS = 3_000_000
"""Total step budget of the plain table; more would take minutes."""
FAST, SLOW = "Tesla-V100-SXM2-16GB", "Tesla-T4"


@dataclass(frozen=True)
class Cost:
    """Number of (degrees, rows) choices of a search, and CPU seconds: tables with layer assignments, and total."""

    choices: int
    assigning_seconds: float
    whole_seconds: float


def main() -> None:
    """Print the tables."""
    console = Console(width=130)
    console.rule("AMP, GPT-2 with 24 layers (26 with embedding and head)")
    four = _problem(cluster_of({"p3.8xlarge": 3, "g4dn.12xlarge": 1}), 32)
    sixteen = _problem(_nodes(16, 16), 1024)
    table = Table(
        "input", "choices", "tables and assignment s", f"whole search, top {TOP}, s", "public code s", "reach s"
    )
    for name, problem, public, reach in (
        ("4 × 4 GPUs, batch 32", four, "230", 0.3),
        ("16 × 16 GPUs, batch 1024", sixteen, "~1,100", 2.0),
    ):
        cost = _cost(problem)
        table.add_row(
            name, str(cost.choices), f"{cost.assigning_seconds:.3f}", f"{cost.whole_seconds:.3f}", public, f"{reach}"
        )
    console.print(table)
    _against_the_table(console, four, "4 × 4 GPUs, batch 32")
    _against_the_table(console, sixteen, "16 × 16 GPUs, batch 1024")
    _growth(console)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"peak memory of this process, all of the above: {peak:.0f} MiB\n")


def _problem(cluster: Cluster, batch: int) -> Problem:
    model = Model.of(GPT2, Dtype.FLOAT16)
    names = [accelerator.name for accelerator in cluster.accelerators]
    rows = tuple(2**power for power in range(6))
    degrees = [degree for degree in (1, 2, 4, 8, 16) if GPT2.heads % degree == 0]
    return Problem(cluster, model, estimate_profiles(model, names, tensor_degrees=degrees, rows=rows), batch)


def _nodes(count: int, devices: int) -> Cluster:
    """Return a cluster of three quarters V100 and one quarter T4, with ports: 10 Gbit/s between nodes, 300 inside."""
    accelerators = (Accelerator(FAST, 16 * 2**30), Accelerator(SLOW, 15 * 2**30))
    card, inside = Port(2e-5, 1.25e9), Port(5e-6, 3.75e10)
    nodes = tuple(
        Node(f"node-{number}", FAST if number < 0.75 * count else SLOW, devices, card, inside)
        for number in range(count)
    )
    used = {node.accelerator for node in nodes}
    return Cluster(tuple(a for a in accelerators if a.name in used), nodes)


def _cost(problem: Problem) -> Cost:
    assigning, count = _seconds(lambda: _assign_all(_afresh(problem)))
    whole, _ = _seconds(lambda: run("amp", _afresh(problem), top=TOP))
    return Cost(count, assigning, whole)


def _afresh(problem: Problem) -> Problem:
    """Return the problem with empty caches."""
    link_matrices.cache_clear()
    node_classes.cache_clear()
    return replace(problem, profiles=replace(problem.profiles), cluster=replace(problem.cluster))


def _assign_all(problem: Problem) -> int:
    drafting = UniformPlanSpace.of(problem)
    count = 0
    for stages, rows in drafting.choices():
        ends = drafting.best_assignment(stages, rows)
        if ends is not None:
            drafting.lazy_candidate(stages, rows, ends)
        count += 1
    return count


def _seconds(work: Callable[[], T]) -> tuple[float, T]:
    """Return the least CPU seconds of three uncached runs."""
    found = []
    for _ in range(3):
        started = time.process_time()
        result = work()
        found.append(time.process_time() - started)
    return min(found), result


def _against_the_table(console: Console, problem: Problem, name: str) -> None:
    """Run the plain table on the cheapest choices within its step budget; extrapolate the rest by step count."""
    drafting = UniformPlanSpace.of(problem)
    choices = sorted(
        (
            (_table_steps(drafting, stages, rows), number, stages, rows)
            for number, (stages, rows) in enumerate(drafting.choices())
        ),
        key=lambda choice: choice[:2],
    )
    every = sum(steps for steps, *_ in choices)
    spent = plain_seconds = own_seconds = 0.0
    taken = better = 0
    for steps, _, stages, rows in choices:
        if steps == 0 or spent + steps > ORACLE_STEPS:
            continue
        times = np.where(drafting.tables.fits(stages, rows), drafting.tables.times(stages, rows), math.inf)
        instance = times, drafting.tables.boundary_seconds(stages, rows), drafting.micro_batches(stages, rows)
        started = time.process_time()
        plain = plain_table(*instance)
        between = time.process_time()
        own = partition(*instance)
        own_seconds += time.process_time() - between
        plain_seconds += between - started
        spent += steps
        taken += 1
        if plain is not None and own is not None:
            least, most = objective(*instance, own), objective(*instance, plain)
            assert least <= most * (1 + 1e-9), f"{own} costs more than {plain}"
            better += least < most * (1 - 1e-9)
    console.print(
        f"{name}, layer assignment alone: the plain table on {taken} of {len(choices)} choices (the cheapest, "
        f"{spent / every:.1%} of its {every:.2g} steps): {plain_seconds:.2f} s, ours on the same {own_seconds:.3f} s: "
        f"[bold]{plain_seconds / own_seconds:,.0f} times faster[/bold]; ours is better by Eq. 5 in {better}, never worse. "
        f"By its steps the plain table takes {plain_seconds * every / spent:,.0f} s for all choices.\n"
    )


def _table_steps(drafting: UniformPlanSpace, stages: PlacedStages, rows: int) -> int:
    """Count the iterations of the plain table's innermost loop: k · L²/2 · the number of stage times."""
    times = drafting.tables.times(stages, rows)[drafting.tables.fits(stages, rows)]
    tolerances = 1 + len(np.unique(times[np.isfinite(times)]))
    size = len(drafting.problem.model.layers) + 1
    return tolerances * sum(end - stage for stage in range(1, stages.pipeline) for end in range(stage + 1, size))


def _growth(console: Console) -> None:
    """Print the cost for batch 4,096 on nodes of eight, which keeps the number of choices about constant."""
    table = Table("devices", "choices", "tables and assignment s", f"whole search, top {TOP}, s")
    sizes, costs = [16, 64, 256, 1024, 4096], []
    for devices in sizes:
        costs.append(_cost(_problem(_nodes(devices // 8, 8), 4096)))
        table.add_row(
            f"{devices:,}",
            str(costs[-1].choices),
            f"{costs[-1].assigning_seconds:.3f}",
            f"{costs[-1].whole_seconds:.3f}",
        )
    console.print(table)
    for name, seconds in (
        ("tables and assignment", [cost.assigning_seconds for cost in costs]),
        ("the whole search", [cost.whole_seconds for cost in costs]),
    ):
        exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
        console.print(f"{name}: CPU seconds grow as devices ^ {exponent:.2f} over {sizes[0]} … {sizes[-1]:,} devices")
