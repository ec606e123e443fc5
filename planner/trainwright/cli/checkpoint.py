"""`trainwright checkpoint`: checkpoints of the worker and those of torch's own trainers, with the worker's code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.framework import command, load_module
from trainwright.cli.inputs.model_file import SequenceLengthOption, read_training
from trainwright.cli.options import ANY_BATCH

WORKER = "trainwright_worker"
REMEDY = "install `trainwright[worker]`, or run this command in the worker's image"

app = typer.Typer(
    add_completion=False,
    help="Convert checkpoints between the worker and torch's own trainers.",
    invoke_without_command=True,
)


@app.callback()
def _without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


@app.command()
@command
def convert(
    *,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Folder of a checkpoint, of the worker or of torch's trainers.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="New folder, of the other kind.")],
    model: Annotated[
        Path | None, typer.Option(help="What the worker trains; needed where SOURCE is of torch's trainers.")
    ] = None,
    sequence_length: SequenceLengthOption = None,
    iteration: Annotated[
        int | None,
        typer.Option(
            min=0, help="Completed iterations, where SOURCE is of torch's trainers; by default its optimizer's steps."
        ),
    ] = None,
) -> None:
    """Convert a checkpoint of the worker to one of torch.distributed.checkpoint's trainers, or back.

    A checkpoint of the worker has no plan: any plan loads it as it is. An index is a pickle, which can run code: convert
    only checkpoints that you trust.
    """
    sys.path.insert(0, str(Path.cwd()))  # the user's own model, as with python -m
    conversion = load_module(f"{WORKER}.checkpoint_conversion", (WORKER, "torch"), REMEDY)
    if conversion.is_of_worker(source):
        if model is not None or iteration is not None:
            raise ValueError(
                f"{source}: a checkpoint of the worker says what it trains; leave out --model and --iteration"
            )
        state, kind = conversion.to_torch(source, target), "torch's trainers"
    elif model is None:
        raise ValueError(f"{source}: not a checkpoint of the worker; if it is of torch's trainers, give --model")
    else:
        training = read_training(model, sequence_length, absent=ANY_BATCH)
        state, kind = conversion.to_worker(source, target, training, iteration=iteration), "the worker"
    typer.echo(f"{target}: {state.family.family} after {state.iteration} iterations, for {kind}")
