"""`trainwright report`: the page of an answer in a cluster, or in a state directory of `tune`, with the operator's package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.cli.framework import command, load_module
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.cli.output import check_writable, note
from trainwright.cli.watch import PACKAGE, REMEDY, ContextOption, NamespaceOption

app = typer.Typer(add_completion=False, help="Write the page of a TrainingPlan's answer.")


@app.command()
@command
def report(
    *,
    plan: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|DIRECTORY",
            help="TrainingPlan of the cluster, or the state directory of `trainwright tune` (.trainwright/NAME).",
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Write a page of all plans that you may read, or of those of --namespace, instead of one answer.",
        ),
    ] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="File to write; by default NAME.html."), WRITTEN
    ] = None,
) -> None:
    """Write the page of a TrainingPlan's answer, which loads nothing from a network; with --cluster one of all plans.

    Read from the cluster with your own rights through kubectl, or from the state directory of `trainwright tune`.
    """
    if cluster == (plan is not None):
        raise ValueError("give the name of a plan, or a state directory of tune, or --cluster")
    source = Path(plan) if plan is not None else None
    is_local = source is not None and _is_local(source)
    if plan is not None and "/" in plan and not is_local:
        raise ValueError(f"{plan}: there is no such file; give a plan of the cluster by its name")
    name = "plans" if source is None else source.resolve().name if is_local else plan
    target = output if output is not None else Path(f"{name}.html")
    check_writable(target)
    target.write_text(_page(source, context, namespace, is_local=is_local), encoding="utf-8")
    note(f"wrote {target}")


def _page(source: Path | None, context: str | None, namespace: str | None, *, is_local: bool) -> str:
    """Return the page of one plan, or of all without `source`."""
    page: str
    if is_local:
        page = _load("local.report").page_of_state(source)
    elif source is None:
        page = _load("kubectl.cluster_page").cluster_page(_load("kubectl.client").Kubectl(context, namespace))
    else:
        page = _load("kubectl.report").stored_page(_load("kubectl.client").Kubectl(context, namespace), str(source))
    return page


def _is_local(source: Path) -> bool:
    """Return whether a file or directory is meant: a plan may have the name of a directory that happens to be here."""
    is_path = len(source.parts) > 1 or source.is_file() or (source / "status.yaml").exists()
    return is_path and source.exists()


def _load(module: str) -> Any:
    return load_module(f"{PACKAGE}.{module}", (PACKAGE,), REMEDY)
