"""AMP's table 2: how long the search takes as the cluster grows."""

from __future__ import annotations

import time
from dataclasses import replace

from trainwright.accelerators import data_sheet, machine
from trainwright.bench.amp_settings import GPT2, problem_on
from trainwright.bench.comparison import Comparison, Grid, Tell, number
from trainwright.bench.figures import amp_figures
from trainwright.cluster import Accelerator, Cluster
from trainwright.search import Problem, run

BATCH = 32
HEADINGS = ("cluster", "paper s", "ours CPU s", "paper/ours")


def search_seconds(tell: Tell) -> Comparison:
    """CPU seconds of our `amp`, the exact costing of its ten best plans included."""
    records = []
    for figure in amp_figures().search_seconds:
        size = f"{figure.nodes} × {figure.devices_per_node}"
        tell(f"AMP's search on {size} devices")
        problem = square_problem(figure.nodes, figure.devices_per_node)
        started = time.process_time()
        found = run("amp", problem, top=10)
        seconds = time.process_time() - started
        records.append(
            {
                "cluster": size,
                "paper_seconds": figure.seconds,
                "cpu_seconds": seconds,
                "best_plan": found[0].plan.summary(),
                "best_predicted_seconds": found[0].estimate.iteration_seconds,
            }
        )
    rows = tuple(
        (
            r["cluster"],
            number(r["paper_seconds"], 1),
            number(r["cpu_seconds"]),
            number(r["paper_seconds"] / r["cpu_seconds"], 0),
        )
        for r in records
    )
    return Comparison(
        name="amp-2",
        title="AMP, table 2: seconds of the search, GPT-2 with 24 layers, batch 32",
        records=tuple(records),
        grids=(Grid("T4 machines with as many devices as there are machines", HEADINGS, rows),),
        notes=(
            "The paper's are seconds of its own program on its own machine; profiling and trials are in neither.",
            "Where the batch is smaller than the cluster, data degrees above it leave replicas without rows and are not choices.",
        ),
    )


def square_problem(nodes: int, devices: int) -> Problem:
    """GPT-2 on machines like AMP's T4 ones, with so many devices each."""
    model = machine("g4dn.12xlarge")
    members = tuple(replace(model.node(f"node-{number}"), devices=devices) for number in range(1, nodes + 1))
    memory = int(data_sheet(model.accelerator).memory_bytes.value)
    return problem_on(Cluster((Accelerator(model.accelerator, memory),), members), GPT2, BATCH)
