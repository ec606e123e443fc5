"""Cost of the operator with many plans and many nodes: CPU, memory, requests and delays, on a real API server.

`python benchmarks/soak [--plans 1000] [--nodes 5000] [--minutes 20] [--only SCENARIO] [--write]`. No kubelet and no
training operator run: nodes and pods are objects whose status this program writes, so only the operator's own cost is measured. Times depend on the machine;
the API server and etcd share it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scenarios import Figure, many_changes, many_nodes, many_plans, one_running_plan

RESULTS = Path(__file__).resolve().parents[1] / "results" / "soak.csv"


def main() -> None:
    """Run the scenarios and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=20.0, help="of random changes with a kill a minute")
    parser.add_argument("--only", choices=("plans", "running", "nodes", "changes"), help="run only one scenario")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    wanted = parser.parse_args()
    scenarios: dict[str, Callable[[], Iterator[Figure]]] = {
        "plans": lambda: many_plans(wanted.plans),
        "running": one_running_plan,
        "nodes": lambda: many_nodes(wanted.nodes),
        "changes": lambda: many_changes(wanted.minutes),
    }
    figures: list[Figure] = []
    for scenario in [scenarios[wanted.only]] if wanted.only else scenarios.values():
        figures.extend(scenario())
        show(figures)
    if wanted.write:
        with RESULTS.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["figure", "value", "unit", "aim", "before"])
            rows.writerows([one.what, f"{one.value:.4g}", one.unit, one.aim, one.before] for one in figures)


def show(figures: list[Figure]) -> None:
    """Print the figures so far."""
    table = Table("figure", "value", "aim", "before", title="Cost of the operator")
    for one in figures:
        table.add_row(one.what, f"{one.value:.4g} {one.unit}", one.aim, one.before)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
