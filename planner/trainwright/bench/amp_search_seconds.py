"""AMP's table 2: how long the search takes as the cluster grows."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from trainwright.accelerators import data_sheet, machine
from trainwright.bench.amp_settings import GPT2, problem_on
from trainwright.bench.comparison import Comparison, Grid, Record, Tell, number
from trainwright.bench.figures import SearchSeconds, amp_figures
from trainwright.cluster import Accelerator, Cluster
from trainwright.search import Candidate, Problem, run

BATCH = 32
HEADINGS = ("cluster", "paper s", "ours CPU s", "paper/ours")


@dataclass(frozen=True, slots=True)
class _Timed:
    published: SearchSeconds
    cpu_seconds: float
    best: Candidate

    @property
    def cluster(self) -> str:
        return f"{self.published.nodes} × {self.published.devices_per_node}"

    def record(self) -> Record:
        return {
            "cluster": self.cluster,
            "published_seconds": self.published.seconds,
            "cpu_seconds": self.cpu_seconds,
            "best_plan": self.best.plan.summary(),
            "best_predicted_seconds": self.best.estimate.iteration_seconds,
        }

    def cells(self) -> tuple[str, ...]:
        ratio = self.published.seconds / self.cpu_seconds if self.cpu_seconds else None
        return self.cluster, number(self.published.seconds, 1), number(self.cpu_seconds), number(ratio, 0)


def search_seconds(tell: Tell) -> Comparison:
    """CPU seconds of our `amp`, the exact costing of its ten best plans included."""
    figures, timed = amp_figures().search_seconds, []
    for done, figure in enumerate(figures):
        tell(f"AMP's search on {figure.nodes} × {figure.devices_per_node} devices", done / len(figures))
        timed.append(_timed(figure))
    return Comparison(
        name="amp-2",
        title="AMP, table 2: seconds of the search, GPT-2 with 24 layers, batch 32",
        records=tuple(each.record() for each in timed),
        grids=(
            Grid(
                "T4 machines with as many devices as there are machines",
                HEADINGS,
                tuple(each.cells() for each in timed),
            ),
        ),
        notes=(
            "The paper's are seconds of its own program on its own machine; profiling and trials are in neither.",
            "Where the batch is smaller than the cluster, data degrees above it leave replicas without rows and are not choices.",
        ),
    )


def _timed(figure: SearchSeconds) -> _Timed:
    problem = square_problem(figure.nodes, figure.devices_per_node)
    started = time.process_time()
    found = run("amp", problem, top=10)
    return _Timed(figure, time.process_time() - started, found[0])


def square_problem(nodes: int, devices: int) -> Problem:
    """GPT-2 on machines like AMP's T4 ones, with so many devices each."""
    model = machine("g4dn.12xlarge")
    members = tuple(replace(model.node(f"node-{number}"), devices=devices) for number in range(1, nodes + 1))
    memory = int(data_sheet(model.accelerator).memory_bytes.value)
    return problem_on(Cluster((Accelerator(model.accelerator, memory),), members), GPT2, BATCH)
