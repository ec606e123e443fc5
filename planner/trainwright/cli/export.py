"""`trainwright export`: a plan as the configuration of another trainer, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright import documents, report
from trainwright.cli.estimate import estimated_plan
from trainwright.cli.framework import command
from trainwright.cli.limit_options import target_names, target_of
from trainwright.cli.options import ANY_BATCH, Inputs, read
from trainwright.cli.output import Output, OutputOption, note, show, show_json
from trainwright.exports import TARGETS, ExportFile, ExportOrder, Target, losses, nearest_plan
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search.expressible import nearest_candidate
from trainwright.training import Optimizer, RequestedDtype, Training

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class PriceInputs:
    """Documents from which the export is priced, as `estimate` takes them."""

    cluster: Annotated[Path | None, typer.Option(help="The cluster; with --model, the export is priced.")] = None
    model: Annotated[Path | None, typer.Option(help="The model, whose sizes the export names.")] = None
    profiles: Annotated[Path | None, typer.Option(help="Measured layer profiles; without them they are estimated.")] = (
        None
    )
    runtime: Annotated[Path | None, typer.Option(help="Calibrated training runtime.")] = None

    def inputs(self) -> Inputs | None:
        """Return the inputs of an estimate; None without a cluster."""
        if self.cluster is None:
            return None
        if self.model is None:
            raise ValueError("--cluster needs --model to price the export; add it, or leave --cluster out")
        return Inputs(self.cluster, self.model, self.profiles, self.runtime)

    def training(self) -> Training | None:
        """Return what is trained; None without a model."""
        if self.model is None:
            return None
        found: Training = read(self.model, Training, absent=ANY_BATCH)
        return found


@dataclass(frozen=True)
class _Export:
    """Plan that is written for a target.

    Attributes:
        price: of the given plan and of the one that is written; None if there is none.
        is_format_open: the model file leaves the number format to a search, which there is none of without a price.
    """

    target: Target
    given: Plan
    plan: Plan
    model: Model | None
    optimizer: Optimizer
    price: report.ExportPrice | None
    is_format_open: bool = False

    @property
    def lost(self) -> tuple[str, ...]:
        return losses(self.given, self.target.capabilities)

    def files(self, file: Path) -> tuple[ExportFile, ...]:
        price = "No price: give --cluster and --model." if self.price is None else self.price.sentence()
        lost = f"Not expressible there: {'; '.join(self.lost)}." if self.lost else "Nothing of the plan is lost."
        remarks = (
            f"{self.plan.summary()} for {self.target.software}, by Trainwright {version('trainwright')} from {file.name}.",
            lost,
            price,
            self.target.remark,
        )
        order = ExportOrder(
            self.plan,
            self.model,
            self.optimizer,
            remarks,
            overlaps_gradients=None if self.price is None else self.price.problem.runtime.overlaps_gradients,
        )
        if self.is_format_open:
            order = replace(order, dtype_reason="assumed: the model file says auto; give --cluster to choose it")
        return self.target.files(order)


@app.command()
@command
def export(
    *,
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan to export.")],
    to: Annotated[
        str, typer.Option(autocompletion=target_names, metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")
    ],
    inputs: PriceInputs,
    into: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the files into this folder; else they are printed.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a plan for another trainer, as near as it can be told, and predict what the difference costs."""
    found = _exported(file, target_of("--to", to), inputs)
    files = found.files(file)
    if into is not None:
        _write(files, into, (file, inputs.cluster, inputs.model, inputs.profiles, inputs.runtime))
    if output is Output.JSON:
        show_json(_fields(found, files))
        return
    if into is None:
        for one in files:
            show(f"# ==> {one.name} <==", one.text, wraps=False)
    show(*report.export_sentences(found.target.software, found.lost, found.price), to_error=into is None)
    if found.price is not None:
        show(report.export_table(found.price), to_error=into is None)
    if into is not None:
        note(f"wrote {', '.join(str(into / one.name) for one in files)}")


def _exported(file: Path, target: Target, given: PriceInputs) -> _Export:
    inputs = given.inputs()
    if inputs is None:
        if Inputs.is_shorthand_of_plan(file):
            raise ValueError(
                f"plan {str(file)!r}: words take the devices of a cluster; give --cluster and --model, or a file"
            )
        plan: Plan = read(file, Plan)
        near, training = nearest_plan(plan, target.capabilities), given.training()
        if training is None:
            return _Export(target, plan, near, None, "adam", None)
        is_open = training.dtype is RequestedDtype.AUTO
        model = (training.in_format(Dtype.BFLOAT16) if is_open else training).model
        return _Export(target, plan, near, model, training.optimizer, None, is_open)
    problem = inputs.problem()
    answer = estimated_plan(file, problem, inputs)
    original = answer.candidates[0]
    limits = answer.problem.limits.leaving_unknown_memory(answer.problem.runtime, answer.problem.cluster)
    nearest = nearest_candidate(replace(answer.problem, limits=limits), original.plan, target.capabilities)
    price = report.ExportPrice(answer.problem, original, nearest)
    return _Export(target, original.plan, nearest.plan, answer.problem.model, problem.optimizer, price)


def _write(files: tuple[ExportFile, ...], folder: Path, read_files: tuple[Path | None, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for one in files:
        path = folder / one.name
        if path.exists() and any(
            other is not None and other.is_file() and path.samefile(other) for other in read_files
        ):
            raise ValueError(f"--into: would overwrite {path}, which is read; write into another folder")
    for one in files:
        (folder / one.name).write_text(one.text, encoding="utf-8")


def _fields(found: _Export, files: tuple[ExportFile, ...]) -> dict[str, Any]:
    price = {} if found.price is None else found.price.fields()
    return {
        "target": found.target.software,
        "lost": list(found.lost),
        **price,
        "plan": documents.dump(found.plan),
        "files": {one.name: one.text for one in files},
    }
