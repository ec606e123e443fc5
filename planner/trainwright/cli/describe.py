"""`trainwright describe`: a model of one's own as the planner reads it, with the worker's code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.framework import command, load_module
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.layer import Dtype

WORKER = "trainwright_worker"
REMEDY = "install `trainwright[worker]`, or run this command in the worker's image"

app = typer.Typer(add_completion=False)


@app.command()
@command
def describe(  # noqa: PLR0913 (options)
    *,
    entrypoint: Annotated[
        str | None, typer.Argument(metavar="ENTRY", help="package.module:function, which returns a CustomModel.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Function that makes a whole torch module, in place of ENTRY: its layers are written as a Python file.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Python file for the layers of --module; default: FILE_layers.py."), WRITTEN
    ] = None,
    training_plan: Annotated[
        bool, typer.Option("--training-plan", help="Write it for spec.model of a TrainingPlan.")
    ] = False,
    check_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time to compute a few rows of each kind of layer, which shows what plans would change.",
        ),
    ] = 120.0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Only number format that the model is trained in; default: all are checked."),
    ] = None,
) -> None:
    """Describe a model of your own without a GPU, and check that plans train the same model."""
    if (entrypoint is None) == (module is None):
        raise ValueError("give either an entry point package.module:function, or --module FILE.py:FUNCTION")
    if write is not None and module is None:
        raise ValueError("--write names the layers' file of --module; leave it out with an entry point")
    sys.path.insert(0, str(Path.cwd()))  # the user's own model, as with python -m
    worker = load_module(f"{WORKER}.describe", (WORKER,), REMEDY)
    load_module("torch", ("torch",), REMEDY)
    if module is not None:
        entrypoint = worker.write_layers(module, write)
    typer.echo(
        worker.description(entrypoint, training_plan=training_plan, check_seconds=check_seconds, dtype=dtype), nl=False
    )
