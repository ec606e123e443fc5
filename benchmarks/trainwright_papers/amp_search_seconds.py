"""AMP's table 2: seconds of the search by cluster size."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from trainwright.accelerators import data_sheet, machine
from trainwright.cluster import Accelerator, Cluster
from trainwright.search import Candidate, Problem, run
from trainwright_papers.amp_settings import GPT2, problem_on
from trainwright_papers.comparison import Comparison, Grid, Record, ReportProgress, format_figure
from trainwright_papers.published import SearchSeconds, amp_figures

BATCH = 32
HEADINGS = ("cluster", "paper s", "ours CPU s", "paper/ours")


@dataclass(frozen=True, slots=True)
class _TimedSearch:
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
        return (
            self.cluster,
            format_figure(self.published.seconds, 1),
            format_figure(self.cpu_seconds),
            format_figure(ratio, 0),
        )


def search_seconds_table(report_progress: ReportProgress) -> Comparison:
    """Rebuild table 2 with CPU seconds of our `amp`, which include the exact estimates of its ten best plans."""
    figures, searches = amp_figures().search_seconds, []
    for finished, figure in enumerate(figures):
        report_progress(f"AMP's search on {figure.nodes} × {figure.devices_per_node} devices", finished / len(figures))
        searches.append(_time_search(figure))
    return Comparison(
        name="amp-2",
        title="AMP, table 2: seconds of the search, GPT-2 with 24 layers, batch 32",
        records=tuple(search.record() for search in searches),
        grids=(
            Grid(
                "T4 machines with as many devices as there are machines",
                HEADINGS,
                tuple(search.cells() for search in searches),
            ),
        ),
        notes=(
            "The paper's are seconds of its own program on its own machine; profiling and trials are in neither.",
            "Where the batch is smaller than the cluster, data degrees above it leave replicas without rows and are not choices.",
        ),
    )


def _time_search(figure: SearchSeconds) -> _TimedSearch:
    problem = square_problem(figure.nodes, figure.devices_per_node)
    started = time.process_time()
    candidates = run("amp", problem, top=10)
    return _TimedSearch(figure, time.process_time() - started, candidates[0])


def square_problem(nodes: int, devices: int) -> Problem:
    """Return the problem of training GPT-2 on AMP's T4 machines with `devices` devices each."""
    t4_machine = machine("g4dn.12xlarge")
    members = tuple(replace(t4_machine.node(f"node-{number}"), devices=devices) for number in range(1, nodes + 1))
    memory_bytes = int(data_sheet(t4_machine.accelerator).memory_bytes.value)
    return problem_on(Cluster((Accelerator(t4_machine.accelerator, memory_bytes),), members), GPT2, BATCH)
