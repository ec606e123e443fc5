"""`trainwright export`: a plan as the configuration of another trainer, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trainwright import documents
from trainwright.accelerators import best_format, data_sheet, has_data_sheet, is_native
from trainwright.answer import Answer, answer_of_plan
from trainwright.answer.formats import in_format
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
    Capabilities,
    ExportFile,
    ExportRequest,
    Target,
    format_loss,
    losses,
    nearest_plan,
)
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.report.error_range import expected_range
from trainwright.report.export_price import ExportPrice, export_table, exported
from trainwright.report.format_sentences import number_format, slow_format
from trainwright.report.plan_summary import idle_devices, short_names
from trainwright.report.remark import Remark, sentences
from trainwright.search import Candidate, Problem
from trainwright.search.expressible import nearest_candidate
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


@dataclass(frozen=True)
class _Export:
    """Plan that is written for a target.

    Attributes:
        model: in the number format that is written; None if it was not given.
        price: of the given plan and of the one that is written; None if there is none.
        given_dtype: number format of the given plan; None where it is not known.
        dtype_reason: why the format that is written is this one; empty if the plan states it.
        formats: answer on the plan's format, if that is written and priced.
    """

    target: Target
    given: Plan
    plan: Plan
    model: Model | None
    optimizer: Optimizer
    price: ExportPrice | None
    given_dtype: Dtype | None = None
    dtype_reason: str = ""
    states_format: bool = True
    formats: Answer | None = None

    @property
    def lost(self) -> tuple[str, ...]:
        capabilities = self.target.capabilities
        if self.model is not None:
            capabilities = capabilities.of(self.model, self.optimizer)
        dtype = None if self.given_dtype is None else format_loss(self.given_dtype, capabilities)
        return (*losses(self.given, capabilities), *([] if dtype is None else [dtype]))

    @property
    def remark(self) -> Remark:
        """Loss of the export, and its cost."""
        return exported(self.target.software, self.lost, self.price)

    @property
    def format_sentences(self) -> list[str]:
        """Sentence on the number format of a plan that states none; empty for one that states it."""
        if self.states_format:
            return []
        written = self.plan.dtype
        if written is None:
            return ["The plan states no number format; neither does a model (--model), so it is yours."]
        return [f"The plan states no number format; it is written in {written}: {self.dtype_reason}."]

    @property
    def missing_kernels(self) -> list[str]:
        """Sentence on GPUs that the trainer's own PyTorch does not know; empty if there are none, or without a cluster."""
        if self.price is None:
            return []
        cluster, missing = self.price.problem.cluster, self.target.capabilities.missing_generations
        used = cluster.accelerators_of(self.plan.nodes)
        older = [name for name in used if has_data_sheet(name) and data_sheet(name).generation in missing]
        if not older:
            return []
        named = " and ".join(short_names(cluster)[name] for name in older)
        sentence = f"The PyTorch that {self.target.software} is tested with has no kernels for {named}"
        others = (
            f", or leave {named} out" if {accelerator.name for accelerator in cluster.accelerators} - {*older} else ""
        )
        return [f"{sentence}: build it against PyTorch 2.10, which is not tested{others}."]

    def files(self, file: Path) -> tuple[ExportFile, ...]:
        price = (
            ["No price: give --cluster and --model."]
            if self.price is None
            else [self.price.sentence(), *self.price.origin_sentences()]
        )
        lost = f"Not expressible there: {'; '.join(self.lost)}." if self.lost else "Nothing of the plan is lost."
        remarks = (
            f"{self.plan.summary()} for {self.target.software}, by Trainwright {version('trainwright')} from {file.name}.",
            lost,
            " ".join(price),
            *self.format_sentences,
            *self.missing_kernels,
            self.target.remark,
        )
        request = ExportRequest(
            self.plan,
            self.model,
            self.optimizer,
            remarks,
            runtime=None if self.price is None else self.price.problem.runtime,
        )
        if self.dtype_reason:
            request = replace(request, dtype_reason=self.dtype_reason)
        return self.target.files(request)


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
    files = plan_export.files(file)
    if into is not None:
        _write(files, into, (file, inputs.cluster, inputs.model, inputs.profiles, inputs.runtime))
    if output is Output.JSON:
        show_json(_fields(plan_export, files))
        return
    if into is None:
        for export_file in files:
            show(f"# ==> {export_file.name} <==", export_file.text, wraps=False)
    show(*plan_export.remark.sentences, *plan_export.format_sentences, to_error=into is None)
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


def _unpriced(file: Path, target: Target, given: PriceInputs) -> _Export:
    """Return the export of a plan alone, in bfloat16 where its format is not known or the target lacks it."""
    if Inputs.is_shorthand_of_plan(file):
        raise ValueError(
            f"plan {str(file)!r}: words take the devices of a cluster; give --cluster and --model, or a file"
        )
    plan: Plan = read(file, Plan)
    training, states = given.training(), plan.dtype is not None
    if training is None and not states:
        near = nearest_plan(plan, target.capabilities)
        return _Export(target, plan, near, None, _ASSUMED_OPTIMIZER, None, states_format=False)
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
        _check_training(target, model, optimizer)
        capabilities = capabilities.of(model, optimizer)
    near = replace(nearest_plan(plan, capabilities), dtype=dtype)
    return _Export(target, plan, near, model, optimizer, None, named, reason, states)


def _priced(file: Path, target: Target, inputs: Inputs) -> _Export:
    """Return the export with its price, in a format that the target has."""
    problem = inputs.problem()
    plan = plan_of(file, problem, inputs)
    states, is_open = plan.dtype is not None, problem.chooses_format
    problem = inputs.in_format_of([plan], problem, file)
    if states or not is_open:  # a slow format is compared with those of the target
        own_formats = Capabilities(every_plan=True, dtypes=target.capabilities.dtypes)
        problem = replace(problem, limits=replace(problem.limits, expressible_by=own_formats))
    answer = answer_of_plan(problem, plan)
    original, requested = answer.best, answer.problem
    _check_training(target, requested.model, requested.optimizer)
    problem = replace(requested, limits=requested.limits.leaving_unknown_memory(requested.runtime, requested.cluster))
    formats: Answer | None = answer
    dtype = problem.model.dtype
    named_by = "model file" if inputs.profiles is None else "profiles"
    reason = "" if states else "the one that a search would choose" if is_open else f"number format of the {named_by}"
    if dtype in target.capabilities.dtypes:
        nearest = nearest_candidate(problem, original.plan, target.capabilities)
    else:
        problem, nearest = _nearest_in_own_format(target, problem, original.plan)
        given = "is" if states or not is_open else "is taken to be"
        reason = f"the fastest that these GPUs compute natively and {target.software} has; the plan {given} in {dtype}"
        formats = None
    written = problem.model.dtype
    nearest = replace(nearest, dtype=written, plan=replace(nearest.plan, dtype=written))
    price = ExportPrice(requested, original, nearest)
    return _Export(
        target, original.plan, nearest.plan, problem.model, problem.optimizer, price, dtype, reason, states, formats
    )


def _check_training(target: Target, model: Model, optimizer: Optimizer) -> None:
    if (refusal := target.capabilities.refusal(model, optimizer)) is not None:
        raise ValueError(refusal)


def _nearest_in_own_format(target: Target, problem: Problem, plan: Plan) -> tuple[Problem, Candidate]:
    """Return the fastest of the nearest plans in each of a target's formats that all its devices compute natively."""
    priced_plans: list[tuple[Problem, Candidate]] = []
    own = best_format(problem.cluster.accelerators_of(plan.nodes), target.capabilities.dtypes)
    for dtype in sorted(
        target.capabilities.dtypes, key=lambda other: other is not own
    ):  # the first one is named in errors
        in_dtype = _in_format_of(target, problem, dtype)
        nearest = nearest_candidate(in_dtype, plan, target.capabilities)
        if all(is_native(name, dtype) for name in problem.cluster.accelerators_of(nearest.plan.nodes)):
            priced_plans.append((in_dtype, nearest))

    def order(pair: tuple[Problem, Candidate]) -> tuple[bool, float]:
        return not pair[1].estimate.feasible, pair[1].estimate.iteration_seconds

    return min(priced_plans, key=order)


def _in_format_of(target: Target, problem: Problem, dtype: Dtype) -> Problem:
    try:
        return in_format(problem, dtype)
    except ValueError as error:
        raise ValueError(
            f"{target.software} has no {problem.model.dtype}, and the profiles cannot be converted: {error}; measure them in "
            f"{dtype}, or leave --cluster out to export without a price"
        ) from None


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


def _fields(plan_export: _Export, files: tuple[ExportFile, ...]) -> dict[str, Any]:
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
