"""`trainwright calibrate`: what measured trials say about the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright import report
from trainwright.cli.answers import show, write_document
from trainwright.cli.command import command
from trainwright.cli.inputs import Inputs, read
from trainwright.fitting import Trials, fit

app = typer.Typer(add_completion=False)


@app.command()
@command
def calibrate(
    *,
    inputs: Inputs,
    trials: Annotated[
        Path, typer.Option(help="Plans that were run, with what was measured; `trainwright schema trials`.")
    ],
    write: Annotated[Path | None, typer.Option(help="Write the runtime into this file; `--runtime` reads it.")] = None,
) -> None:
    """Fit the cost model to measured trials. The account goes to standard output, or to standard error without --write."""
    if inputs.searches_batch:
        raise ValueError("the trials have batch sizes of their own; --global-batch-size search goes with a planner")
    measured: Trials = read(trials, Trials)
    found = fit(measured, inputs.problem().setting)
    write_document(found.runtime, write)
    show(report.fit_account(found), to_error=write is None)
