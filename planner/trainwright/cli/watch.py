"""`trainwright watch`: a TrainingPlan of a cluster as it goes on, with the operator's package and kubectl."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.cli.framework import command, load_module

PACKAGE = "trainwright_operator"
REMEDY = "install trainwright from its source with `pip install .`, or run `make venv`"

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the plan; by default the kubeconfig's.")
]
ContextOption = Annotated[str | None, typer.Option(help="Context of the kubeconfig; by default its present one.")]

app = typer.Typer(add_completion=False, help="Show how far a TrainingPlan of a cluster is.")


@app.command()
@command
def watch(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="TrainingPlan of the cluster.")],
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Show the phases and trials of a TrainingPlan as they go on, then its answer: read with your own rights through kubectl.

    Exit codes: 0 with a winner, 1 without one, 2 where the plan cannot be read.
    """
    module = load_module(f"{PACKAGE}.kubectl.watch", (PACKAGE,), REMEDY)
    raise typer.Exit(module.watch(name, namespace=namespace, context=context))
