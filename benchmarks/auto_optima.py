"""Fastest plans of tiny problems by enumeration, computed once, stored as a table and compared with `auto`.

`PYTHONPATH=tests/planner/oracles python benchmarks/auto_optima.py [FIRST END]` enumerates the instances FIRST … END -
1 anew and writes the table.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from auto_instances import instance
from auto_oracle import PlanSpace, fastest

from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, SearchControl

RESULTS = Path(__file__).parent / "results" / "auto_optima.csv"
INSTANCES = 320
MAX_PLANS = 12_000


@dataclass(frozen=True)
class Optimum:
    """Instance with the least iteration seconds of all its plans; infinite where none fits."""

    seed: int
    plans: int
    seconds: float

    @property
    def problem(self) -> Problem:
        """Return a new problem of the instance."""
        return instance(self.seed, MAX_PLANS)

    def difference(self, search: str) -> float:
        """Return how much slower the search's plan is, as a ratio minus 1: infinite if it finds none."""
        try:
            found = SEARCHES[search](self.problem, SearchControl(), 1)[0].estimate.iteration_seconds
        except NoFeasiblePlan:
            found = math.inf
        return 0.0 if found == self.seconds else found / self.seconds - 1


def optima() -> Iterator[Optimum]:
    """Yield the stored optima."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Optimum(int(row["seed"]), int(row["plans"]), float(row["seconds"]))


def main(arguments: Sequence[str]) -> None:
    """Enumerate instances and write the table, as the module describes."""
    first, end = map(int, arguments) if arguments else (0, INSTANCES)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["seed", "devices", "layers", "types", "batch", "plans", "seconds", "best plan"])
        for seed in range(first, end):
            problem = instance(seed, MAX_PLANS)
            seconds, plan = fastest(problem)
            sizes = len(problem.devices), len(problem.model.layers), len(problem.cluster.accelerators)
            shown = plan.summary() if plan else "-"
            table.writerow([seed, *sizes, problem.global_batch_size, PlanSpace(problem).size(), repr(seconds), shown])
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
