"""Iteration times of the executor beside those of trainers that are not ours, on the CPU over gloo, from the same weights.

`python benchmarks/trainers [--trainer torch] [--rounds 15] [--processes 2] [--write]`. Both run in the same processes, on
the torch of this environment. Seconds depend on the machine's load; ratios are of iterations that follow each other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from trainers.comparison import MAX_LOSS_ERROR, keep, show
from trainers.gang import TRAINERS, compare_trainers
from trainers.plans import PLANS

RESULTS = Path(__file__).resolve().parents[1] / "results" / "trainers.csv"


def main() -> int:
    """Compare the trainers. Returns 1 if a plan's losses differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trainer", choices=TRAINERS, default="torch", help="the other trainer (default torch's parts)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed iterations of each trainer (default 15)")
    parser.add_argument("--processes", type=int, choices=PLANS, help="only plans of this many processes")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    console = Console(width=120) if not sys.stdout.isatty() else Console()
    compared = []
    for processes in [arguments.processes] if arguments.processes else PLANS:
        compared += compare_trainers(arguments.trainer, processes, arguments.rounds)
    show(compared, console)
    if arguments.write:
        keep(compared, RESULTS)
    different = [one for one in compared if not one.loss_error <= MAX_LOSS_ERROR]
    for one in different:
        console.print(f"{one.model}, {one.plan}: losses differ by {one.loss_error:.1e}, above {MAX_LOSS_ERROR:.0e}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
