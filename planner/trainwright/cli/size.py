"""`trainwright size`: how many accelerators a model needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from trainwright.accelerators import data_sheet, data_sheets
from trainwright.answer.sizing import SIZING_SECONDS, Size, sizes_of
from trainwright.cli.framework import command, end_if_interrupted, show_progress
from trainwright.cli.inputs.model_file import DecoderSequenceLengthOption, SequenceLengthOption, read_training
from trainwright.cli.limit_options import HeadroomOption, RunOptions
from trainwright.cli.options import ANY_BATCH, DEFAULT_PLANNER, SearchOptions, runtime_of
from trainwright.cli.output import Output, OutputOption, note, show, show_json
from trainwright.exports import TARGETS
from trainwright.report.model_reading import ModelReading
from trainwright.report.sizing import runtime_sentences, size_fields, size_sentences, size_table
from trainwright.search import Limits, NoFeasiblePlan, Problem, preload_search
from trainwright.training import Training

app = typer.Typer(add_completion=False)


def accelerator_names(incomplete: str) -> list[str]:
    """Complete the last name in the shell."""
    given, comma, last = incomplete.rpartition(",")
    return [f"{given}{comma}{sheet.name}" for sheet in data_sheets() if sheet.name.startswith(last)]


@dataclass(frozen=True)
class SizeInputs:
    """Model, and how it is trained."""

    model: Annotated[
        Path, typer.Option(help="Model family, batch size, number format, optimizer; or a config.json of Hugging Face.")
    ]
    accelerators: Annotated[
        str,
        typer.Option(
            autocompletion=accelerator_names,
            metavar="NAME,…",
            help="Accelerators to answer for, e.g. A100-80,H100; `trainwright accelerators` lists them.",
        ),
    ]
    runtime: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME|FILE", help="Training runtime: a preset (`trainwright runtimes` lists them), or a file."
        ),
    ] = None
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of one iteration, in place of the model file's.")
    ] = None
    sequence_length: SequenceLengthOption = None
    decoder_sequence_length: DecoderSequenceLengthOption = None
    memory_headroom: HeadroomOption = None

    @property
    def names(self) -> list[str]:
        """Accelerators by their data sheets, each once. Raises ValueError for an unknown one."""
        given = [name.strip() for name in self.accelerators.split(",") if name.strip()]
        if not given:
            raise ValueError(
                f"--accelerators needs at least one name, for example A100-80,H100, got {self.accelerators!r}"
            )
        try:
            return list(dict.fromkeys(data_sheet(name).name for name in given))
        except ValueError as error:
            raise ValueError(f"--accelerators: {error}") from None

    def training(self) -> Training:
        absent = None if self.global_batch_size is None else ANY_BATCH
        training = read_training(self.model, self.sequence_length, self.decoder_sequence_length, absent=absent)
        if self.global_batch_size is None:
            return training
        return replace(training, global_batch_size=self.global_batch_size)


@app.command()
@command
def size(
    *,
    inputs: SizeInputs,
    run: RunOptions,
    budget_seconds: Annotated[
        float, typer.Option(help="Seconds for the searches of all accelerators together.")
    ] = SIZING_SECONDS,
    output: OutputOption = Output.TABLE,
) -> None:
    """Find how many accelerators of each kind a model needs, what decides the number, and the time and price of a run.

    A number is of devices of one machine up to its size, above it of whole machines of the list. With --within it is the smallest
    number that ends the run by then.
    """
    names, training, runtime = inputs.names, inputs.training(), runtime_of(inputs.runtime)
    capabilities = None if runtime.trainer is None else TARGETS[runtime.trainer].capabilities
    limits = Limits(
        memory_headroom_ratio=inputs.memory_headroom,
        expressible_by=capabilities,
        run=run.run_of(training.family),
    )
    preload_search(DEFAULT_PLANNER)
    with show_progress("sizing", SearchOptions(budget_seconds=budget_seconds)) as control:
        sizes = sizes_of(training, names, runtime, limits, control)
    answered = [each for each in sizes if each.answer is not None]
    if not answered:
        raise NoFeasiblePlan("; ".join(each.refusal for each in sizes))
    note("layer profiles are estimated from data sheets, not measured")
    if output is Output.JSON:
        show_json({"sizes": [size_fields(each) for each in sizes]})
    else:
        problem = _problem_of(answered[0])
        show(ModelReading.of(problem.model, problem.optimizer).sentence, "", size_table(sizes))
        for each in sizes:
            show("", *size_sentences(each))
        show("", *runtime_sentences(answered[0]))
    end_if_interrupted(control)


def _problem_of(size: Size) -> Problem:
    assert size.answer is not None
    return size.answer.problem
