"""`trainwright export`: a plan as the configuration of another trainer, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trainwright import documents
from trainwright.cli.estimate import plan_of
from trainwright.cli.framework import command
from trainwright.cli.inputs.document_files import read
from trainwright.cli.inputs.model_file import DecoderSequenceLengthOption, SequenceLengthOption, read_training
from trainwright.cli.limit_options import target_names, target_of
from trainwright.cli.options import ANY_BATCH, Inputs
from trainwright.cli.output import Output, OutputOption, note, show, show_json
from trainwright.documents import DocumentError
from trainwright.exports import (
    TARGETS,
    ExportFile,
    Target,
    nearest_plan,
)
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.report.error_range import expected_range
from trainwright.report.export_price import export_table
from trainwright.report.format_sentences import number_format, slow_format
from trainwright.report.plan_export import PlanExport, check_training
from trainwright.report.plan_summary import idle_devices
from trainwright.report.remark import sentences
from trainwright.training import Optimizer, RequestedDtype, Training

app = typer.Typer(add_completion=False)

_ASSUMED_OPTIMIZER: Final[Optimizer] = "adam"
_SEARCH: Final = (
    "`trainwright plan --expressible-by {to}` searches among all plans that it can run, and may find a faster one."
)


@dataclass(frozen=True)
class PriceInputs:
    """Documents from which the export is priced, as `estimate` takes them."""

    cluster: Annotated[Path | None, typer.Option(help="The cluster; with --model, the export is priced.")] = None
    model: Annotated[Path | None, typer.Option(help="The model, whose sizes the export names.")] = None
    profiles: Annotated[Path | None, typer.Option(help="Measured layer profiles; without them they are estimated.")] = (
        None
    )
    runtime: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Training runtime of the price: a preset or a file; default: the target's preset, if it has one.",
        ),
    ] = None
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="ROWS", help="Rows of one iteration, in place of the model file's.")
    ] = None
    sequence_length: SequenceLengthOption = None
    decoder_sequence_length: DecoderSequenceLengthOption = None

    def inputs(self, to: str) -> Inputs | None:
        """Return the inputs of an estimate with the runtime of a target; None without a cluster."""
        if self.cluster is None:
            for option, given in (("--profiles", self.profiles), ("--runtime", self.runtime)):
                if given is not None:
                    raise ValueError(
                        f"{option} needs --cluster and --model to price the export; add them, or leave {option} out"
                    )
            return None
        if self.model is None:
            raise ValueError("--cluster needs --model to price the export; add it, or leave --cluster out")
        runtime = self.runtime
        preset = target_of("--to", to).preset
        if runtime is None and preset is not None:
            runtime = Path(preset)
            note(f"the price is of {preset}'s runtime; `--runtime trainwright` prices our worker's")
        rows = None if self.global_batch_size is None else str(self.global_batch_size)
        lengths = self.sequence_length, self.decoder_sequence_length
        return Inputs(self.cluster, self.model, self.profiles, runtime, rows, *lengths)

    def training(self) -> Training | None:
        """Return what is trained; None without a model."""
        if self.model is None:
            return None
        return read_training(self.model, self.sequence_length, self.decoder_sequence_length, absent=ANY_BATCH)


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
    """Write a plan for another trainer, as near as that supports, and predict what the difference costs."""
    target = target_of("--to", to)
    priced = inputs.inputs(to)
    plan_export = _unpriced(file, target, inputs) if priced is None else _priced(file, target, priced)
    files = plan_export.files(file.name)
    if into is not None:
        _write(files, into, (file, inputs.cluster, inputs.model, inputs.profiles, inputs.runtime))
    if output is Output.JSON:
        show_json(_fields(plan_export, files))
        return
    if into is None:
        for export_file in files:
            show(f"# ==> {export_file.name} <==", export_file.text, wraps=False)
    said = (plan_export.remark.sentences, plan_export.length_sentences, plan_export.format_sentences)
    show(*(sentence for part in said for sentence in part), to_error=into is None)
    if plan_export.price is not None:
        others = [] if target.capabilities.every_plan else [_SEARCH.format(to=to)]
        lines = sentences(
            idle_devices(plan_export.plan, plan_export.price.problem.cluster),
            expected_range(plan_export.price.exported, plan_export.price.problem),
            *([] if plan_export.formats is None else [number_format(plan_export.formats, given=True)]),
        )
        show(
            *lines,
            *plan_export.missing_kernels,
            *others,
            export_table(plan_export.price),
            to_error=into is None,
        )
    if into is not None:
        note(f"wrote {', '.join(str(into / written.name) for written in files)}")


def _unpriced(file: Path, target: Target, given: PriceInputs) -> PlanExport:
    """Return the export of a plan alone, in bfloat16 where its format is not known or the target lacks it."""
    if Inputs.is_shorthand_of_plan(file):
        raise ValueError(
            f"plan {str(file)!r}: words take the devices of a cluster; give --cluster and --model, or a file"
        )
    plan: Plan = read(file, Plan)
    training, states = given.training(), plan.dtype is not None
    if training is None and not states:
        near = nearest_plan(plan, target.capabilities)
        return PlanExport(target, plan, near, None, _ASSUMED_OPTIMIZER, None, states_format=False)
    named = plan.dtype if training is None or training.dtype is RequestedDtype.AUTO else Dtype(training.dtype)
    if plan.dtype not in (None, named):
        raise DocumentError(
            f"{file}: the plan is in {plan.dtype}, but the model in {named}; make them equal, or leave dtype out of {given.model}"
        )
    dtype, reason = named, "" if states else "number format of the model file"
    if dtype is None or dtype not in target.capabilities.dtypes:
        why = "the model file says auto" if named is None else f"{target.software} has no {named}"
        dtype, reason = Dtype.BFLOAT16, f"assumed: {why}; give --cluster to choose it"
    model: Model | None = None
    optimizer, capabilities = _ASSUMED_OPTIMIZER, target.capabilities
    if training is not None:
        model, optimizer = training.in_format(dtype).model, training.optimizer
        check_training(target, model, optimizer, plan)
        capabilities = capabilities.of(model, optimizer)
    near = replace(nearest_plan(plan, capabilities), dtype=dtype)
    return PlanExport(target, plan, near, model, optimizer, None, named, reason, states)


def _priced(file: Path, target: Target, inputs: Inputs) -> PlanExport:
    """Return the export with its price, in a format that the target has."""
    problem = inputs.problem()
    plan = plan_of(file, problem, inputs)
    is_open = problem.chooses_format
    named_by = "model file" if inputs.profiles is None else "profiles"
    return PlanExport.priced(
        target, inputs.in_format_of([plan], problem, file), plan, is_open=is_open, named_by=named_by
    )


def _write(files: tuple[ExportFile, ...], folder: Path, read_files: tuple[Path | None, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for export_file in files:
        path = folder / export_file.name
        if path.exists() and any(
            other is not None and other.is_file() and path.samefile(other) for other in read_files
        ):
            raise ValueError(f"--into: would overwrite {path}, which is read; write into another folder")
    for export_file in files:
        (folder / export_file.name).write_text(export_file.text, encoding="utf-8")


def _fields(plan_export: PlanExport, files: tuple[ExportFile, ...]) -> dict[str, Any]:
    dtype = {} if plan_export.plan.dtype is None else {"dtype": plan_export.plan.dtype}
    return {
        **plan_export.remark.fields,
        **dtype,
        **({"dtype_reason": plan_export.dtype_reason} if plan_export.dtype_reason else {}),
        **(
            {}
            if plan_export.formats is None
            else slow_format(plan_export.formats.slow, plan_export.formats.problem.cluster).fields
        ),
        "plan": documents.dump(plan_export.plan),
        "files": {export_file.name: export_file.text for export_file in files},
    }
