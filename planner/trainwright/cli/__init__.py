"""The command line.

Exit codes: 2 for input that cannot be used (one sentence on standard error), 3 where no plan is feasible, 1 where the
answer cannot be written, 130 where it was interrupted.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from trainwright.outside.plain_text import plain_text

NOT_WRITTEN, BAD_OPTIONS = 1, 2

COMMANDS = {
    "plan": ("plan", "Find the plans that train fastest, best first."),
    "estimate": ("estimate", "Predict the time and memory of a plan."),
    "compare": ("compare", "Run several searches and show the best plan of each side by side."),
    "explain": ("explain", "Explain where the time of a plan goes, with a timeline."),
    "export": ("export", "Write a plan for another trainer, and predict what the difference costs."),
    "calibrate": ("trials", "Fit the cost model to measured trials."),
    "trial": ("trials", "Compare a measured trial with its prediction, with its timeline."),
    "diagnose": ("diagnose", "Say why a run is slow: measured against predicted, and what the cause costs."),
    "size": ("size", "Find how many accelerators of each kind a model needs, and what decides the number."),
    "tune": ("tune", "Find and measure the fastest plan on this machine, without Kubernetes."),
    "watch": ("watch", "Show how far a TrainingPlan of a cluster is, until it has its answer."),
    "report": ("report", "Write the page of a TrainingPlan's answer, from a cluster or from `tune`."),
    "mcp": ("mcp", "Serve these answers to language models: the Model Context Protocol."),
    "propose": ("propose", "Propose the next trial, or say that none is worth it."),
    "cluster": ("hardware", "Write a cluster document from machines, Kubernetes' nodes or this machine's GPUs."),
    "machines": ("hardware", "List the machines that `cluster` knows."),
    "accelerators": ("hardware", "List the data sheets of accelerators."),
    "runtimes": ("hardware", "List the presets of training runtimes."),
    "model": (
        "model",
        "Show what a model is: parameters by part, FLOPs, bytes; reads a config.json of Hugging Face, too.",
    ),
    "profiles": ("profiles", "Import, estimate or merge layer profiles."),
    "describe": ("describe", "Describe a model of your own, or cut a torch module into layers."),
    "checkpoint": ("checkpoint", "Convert checkpoints between the worker and torch's own trainers."),
    "bench": ("bench", "Compare estimates with published figures."),
    "schema": ("schema", "Print the JSON schema of a document."),
}
"""Module and help of each command, in listing order; commands of one module share its app."""


class _Commands(TyperGroup):
    """Group that imports a command on first use, so that help and completion load no search."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the interface of a group
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        loaded = get_command(import_module(f"{__name__}.{COMMANDS[cmd_name][0]}").app)
        if isinstance(loaded, TyperGroup) and cmd_name in loaded.commands:
            return loaded.commands[cmd_name]
        return loaded

    def format_help(self, ctx: Any, formatter: Any) -> None:
        names = [TyperCommand(name, help=text) for name, (_, text) in COMMANDS.items()]
        listed = TyperGroup(name=self.name, commands=names, help=self.help, params=self.params)
        listed.format_help(ctx, formatter)

    def main(self, *arguments: Any, **more: Any) -> Any:
        """Run like Typer, but report wrong options in one sentence."""
        if not more.get("standalone_mode", True):
            return super().main(*arguments, **more)
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot encode × prints a replacement instead of failing.
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            status = super().main(*arguments, **{**more, "standalone_mode": False})
        except TyperException as refusal:
            _word(refusal)
            message = " ".join(refusal.format_message().split()).replace("Value error, ", "", 1)
            context = getattr(refusal, "ctx", None)
            where = "" if context is None else f"; see `{context.command_path} --help`"
            typer.echo(f"trainwright: {plain_text(message.removesuffix('.'))}{where}", err=True)
            sys.exit(BAD_OPTIONS)
        except OSError as error:
            typer.echo(f"trainwright: the help cannot be written: {error.strerror or error}", err=True)
            sys.exit(NOT_WRITTEN)
        sys.exit(status if isinstance(status, int) else 0)


def _word(refusal: TyperException) -> None:
    """Say what is wrong with an option's value as documents do, in place of pydantic's words."""
    from pydantic import ValidationError  # noqa: PLC0415 - on the way to a refusal alone

    from trainwright.documents import wrong_value  # noqa: PLC0415

    cause, option = refusal.__cause__, getattr(refusal, "param", None)
    if isinstance(cause, ValidationError) and option is not None:
        refusal.message = wrong_value(cause, str(option.name))


app = typer.Typer(
    cls=_Commands,
    help=f"""Find the placement and the parallel degrees that train a model fastest on mixed GPUs.

    Times are predicted unless they say that they were measured; what is emulated or estimated says so.

    {" ".join(__doc__.splitlines()[2:])}
    """,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


def _show_version(*, shows_version: bool) -> None:
    if shows_version:
        typer.echo(f"trainwright {version('trainwright')}")
        raise typer.Exit


@app.callback()
def _without_command(
    context: typer.Context,
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
