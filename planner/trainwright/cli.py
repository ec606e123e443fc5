"""The command line: `trainwright plan`, `trainwright estimate`, `trainwright schema`.

Exit codes: 2 for input that cannot be used (one sentence on standard error), 3 where no plan is feasible.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from trainwright import documents, report
from trainwright.cluster import Cluster
from trainwright.cost import amp as amp_cost
from trainwright.cost.estimate import estimate_in
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.search import Limits, NoFeasiblePlan, Problem, run
from trainwright.training import Training

NOT_WRITTEN, BAD_INPUT, NOTHING_FEASIBLE = 1, 2, 3
MAX_DOCUMENT_BYTES = 64 * 2**20

DOCUMENTS: dict[str, Any] = {"cluster": Cluster, "model": Training, "profiles": Profiles, "plan": Plan}
"""The documents that the command line reads and writes, by the name that `schema` knows them under."""

app = typer.Typer(
    help=f"{__doc__}\n\nWhat stands in the files: `trainwright schema cluster` (model, profiles, plan).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Output(StrEnum):
    """For people or for programs."""

    TABLE = "table"
    JSON = "json"


class CostModel(StrEnum):
    """The exact replay, or AMP's Eq. 3–5."""

    EXACT = "exact"
    AMP = "amp"


ClusterFile = Annotated[Path, typer.Option("--cluster", help="Accelerators, nodes and measured links.")]
ModelFile = Annotated[Path, typer.Option("--model", help="What to train: model, batch size, number format.")]
ProfilesFile = Annotated[Path | None, typer.Option("--profiles", help="Measured layer profiles; needed.")]
OutputOption = Annotated[Output, typer.Option("--output", help="A table for people or JSON for programs.")]


@app.command()
def plan(  # noqa: PLR0913, PLR0917 - each parameter is an option of the command line
    cluster: ClusterFile,
    model: ModelFile,
    profiles: ProfilesFile = None,
    planner: Annotated[str, typer.Option(help="The search: amp or megatron.")] = "amp",
    top: Annotated[int, typer.Option(help="How many candidates to show.")] = 10,
    max_tensor_degree: Annotated[int | None, typer.Option(help="The largest tensor degree to use.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Find the plans that train fastest, best first."""
    with _one_sentence():
        problem = _problem(cluster, model, profiles, max_tensor_degree)
        started = time.perf_counter()
        candidates = run(planner, problem, top=top)
        search_seconds = time.perf_counter() - started
        if output is Output.TABLE:
            _print(report.candidate_table(candidates, problem.cluster, planner=planner))
            return
        found = [
            {
                "rank": number,
                "predicted_seconds": candidate.estimate.iteration_seconds,
                "peak_memory_bytes": candidate.estimate.peak_memory_bytes,
                "plan": documents.dump(candidate.plan),
            }
            for number, candidate in enumerate(candidates, 1)
        ]
        _print_json({"planner": planner, "search_seconds": search_seconds, "candidates": found})


@app.command()
def estimate(  # noqa: PLR0913, PLR0917 - as above
    cluster: ClusterFile,
    model: ModelFile,
    plan_file: Annotated[Path, typer.Option("--plan", help="The plan to cost.")],
    profiles: ProfilesFile = None,
    cost_model: Annotated[
        CostModel, typer.Option(help="exact: a replay of the schedule; amp: Eq. 3-5 of the AMP paper.")
    ] = CostModel.EXACT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Tell what a plan costs, whoever made it. Under `--cost-model amp` the breakdown stays that of the replay."""
    with _one_sentence():
        problem = _problem(cluster, model, profiles, None)
        given: Plan = _read(plan_file, Plan)
        if given.global_batch_size != problem.global_batch_size:
            raise documents.DocumentError(
                f"{plan_file}: the plan is for a global batch of {given.global_batch_size} rows, but {model} asks for "
                f"{problem.global_batch_size}; make them equal"
            )
        found = estimate_in(given, problem.setting)
        seconds = found.iteration_seconds
        if cost_model is CostModel.AMP:
            seconds = amp_cost.estimate_seconds(given, problem.setting)
        if output is Output.JSON:
            _print_json(
                {
                    "predicted_seconds": seconds,
                    "peak_memory_bytes": found.peak_memory_bytes,
                    "feasible": found.feasible,
                    "reason": found.reason,
                    "breakdown": asdict(found.breakdown),
                }
            )
            return
        _print(report.breakdown_table(found, given, problem.cluster))
        if cost_model is CostModel.AMP:
            typer.echo(f"AMP's Eq. 3–5 predict {seconds:.4g} s")
        if found.reason is not None:
            typer.echo(f"not feasible: {found.reason}")


@app.command()
def schema(name: Annotated[str, typer.Argument(help=f"One of {', '.join(DOCUMENTS)}.")]) -> None:
    """Print the JSON schema of a document."""
    with _one_sentence():
        if name not in DOCUMENTS:
            raise documents.DocumentError(f"there is no document {name!r}; choose one of {', '.join(DOCUMENTS)}")
        _print_json(documents.schema(DOCUMENTS[name]))


def _problem(cluster: Path, model: Path, profiles: Path | None, max_tensor_degree: int | None) -> Problem:
    if profiles is None:
        raise documents.DocumentError(
            "--profiles is needed: layers are costed from measured profiles, there are no data sheets to estimate them from"
        )
    training: Training = _read(model, Training)
    return Problem(
        cluster=_read(cluster, Cluster),
        model=training.model,
        profiles=_read(profiles, Profiles),
        global_batch_size=training.global_batch_size,
        limits=Limits(max_tensor_degree=max_tensor_degree),
        optimizer=training.optimizer,
    )


def _read(path: Path, noun: Any) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise documents.DocumentError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_DOCUMENT_BYTES:
        raise documents.DocumentError(f"{path}: larger than {MAX_DOCUMENT_BYTES} bytes; this is not such a document")
    return documents.loads(content, noun, source=str(path))


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Refusals become one sentence on standard error and an exit code; a reader that went away is no refusal."""
    try:
        yield
    except NoFeasiblePlan as refusal:
        _fail(refusal, NOTHING_FEASIBLE)
    except ValueError as error:
        _fail(error, BAD_INPUT)
    except BrokenPipeError:
        raise
    except OSError as error:
        _fail(OSError(f"the answer cannot be written: {error.strerror or error}"), NOT_WRITTEN)


def _fail(error: Exception, code: int) -> NoReturn:
    typer.echo(f"trainwright: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from None


def _print(table: Any) -> None:
    Console(file=sys.stdout).print(table)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
