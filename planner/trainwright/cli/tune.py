"""`trainwright tune`: the whole way of a TrainingPlan on this machine, with the operator's package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.framework import command, load_module

PACKAGE = "trainwright_operator"
REMEDY = "install trainwright from its source with `pip install '.[worker]'`, or run `make venv`"

app = typer.Typer(add_completion=False, help="Find and measure the fastest plan on this machine.")


@app.command()
@command
def tune(
    *,
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN.yaml", help="TrainingPlan, as `kubectl apply --filename` takes it.")
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the measurements and the answer; by default .trainwright/NAME beside PLAN.yaml."
        ),
    ] = None,
    cpu_devices: Annotated[
        int | None,
        typer.Option(help="Number of CPU devices, instead of the GPUs or one for each of up to 4 physical cores."),
    ] = None,
) -> None:
    """Measure links and layers, search, try the best plans, and write the winner, all on this machine.

    On its NVIDIA GPUs, or on its CPU cores where there are none; without Kubernetes, root and containers. An interrupted run is
    continued by the same command, and an edited plan reuses what it can. Exit codes: 0 with a winner, 1 where the plan failed, 2 for
    input that cannot be used (nothing is started then), 3 where no plan is feasible, 130 where it was interrupted.
    """
    if not sys.platform.startswith("linux"):  # the package cannot even be loaded on Windows
        raise ValueError(f"tune runs on Linux, since it counts what other programs take there; this is {sys.platform}")
    module = load_module(f"{PACKAGE}.local.loop", (PACKAGE,), REMEDY)
    raise typer.Exit(module.tune(plan, state=state, cpu_devices=cpu_devices))
