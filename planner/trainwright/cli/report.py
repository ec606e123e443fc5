"""`trainwright report`: the page of an answer in a cluster, or in a state directory of `tune`, with the operator's package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.cli.framework import command, load_module
from trainwright.cli.output import check_writable, note
from trainwright.cli.overwriting import WRITTEN
from trainwright.cli.watch import PACKAGE, REMEDY, ContextOption, NamespaceOption

app = typer.Typer(add_completion=False, help="Write the page of a TrainingPlan's answer.")


@app.command()
@command
def report(
    *,
    plan: Annotated[
        str,
        typer.Argument(
            metavar="NAME|DIRECTORY",
            help="TrainingPlan of the cluster, or the state directory of `trainwright tune` (.trainwright/NAME).",
        ),
    ],
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="File to write; by default NAME.html."), WRITTEN
    ] = None,
) -> None:
    """Write the page of a TrainingPlan's answer, which loads nothing from a network.

    Read from the cluster with your own rights through kubectl, or from the state directory of `trainwright tune`.
    """
    directory = Path(plan)
    target = output if output is not None else Path(f"{directory.resolve().name if directory.exists() else plan}.html")
    if "/" in plan and not directory.exists():
        raise ValueError(f"{plan}: there is no such file; give a plan of the cluster by its name")
    check_writable(target)
    if directory.exists():
        page = _load("local.report").page_of_state(directory)
    else:
        client = _load("kubectl.client").Kubectl(context, namespace)
        page = _load("kubectl.report").stored_page(client, plan)
    target.write_text(page, encoding="utf-8")
    note(f"wrote {target}")


def _load(module: str) -> Any:
    return load_module(f"{PACKAGE}.{module}", (PACKAGE,), REMEDY)
