"""What the planning commands read: documents, limits and how to search, as options, and the problem they describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import SEARCHES, Limits, Objective, Problem
from trainwright.training import Training

MAX_DOCUMENT_BYTES = 64 * 2**20
SEARCHED = "search"
"""In place of a batch size: find the one with the best throughput."""


def read(path: Path, noun: Any) -> Any:
    """The noun in a file. Raises DocumentError with one sentence."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise documents.DocumentError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_DOCUMENT_BYTES:
        raise documents.DocumentError(f"{path}: larger than {MAX_DOCUMENT_BYTES} bytes; this is not such a document")
    return documents.loads(content, noun, source=str(path))


def planner_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in SEARCHES if name.startswith(incomplete)]


@dataclass(frozen=True)
class Inputs:
    """The documents, and the batch where it is not that of the model file."""

    cluster: Annotated[Path, typer.Option(help="Accelerators, nodes and links; `trainwright cluster` writes one.")]
    model: Annotated[Path, typer.Option(help="What to train: model family, batch size, number format, optimizer.")]
    profiles: Annotated[
        Path | None,
        typer.Option(help="Measured layer profiles. Without it they are estimated from accelerators' data sheets."),
    ] = None
    runtime: Annotated[
        Path | None, typer.Option(help="What `trainwright calibrate` found out about the training runtime.")
    ] = None
    global_batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS|search",
            help="Rows of one iteration, in place of the model file's; `search` looks for the best throughput.",
        ),
    ] = None

    @property
    def searches_batch(self) -> bool:
        """Whether the batch size is to be found, too."""
        return self.global_batch_size == SEARCHED

    def problem(self, limits: Limits | None = None) -> Problem:
        """What a search is asked. Profiles that are not given are estimated, which is said on standard error."""
        training: Training = read(self.model, Training)
        cluster: Cluster = read(self.cluster, Cluster)
        limits = limits or Limits()
        batch = training.global_batch_size
        if self.global_batch_size is not None and not self.searches_batch:
            batch = _rows(self.global_batch_size)
        return Problem(
            cluster=cluster,
            model=training.model,
            profiles=self._profiles(),
            global_batch_size=batch,
            limits=limits,
            optimizer=training.optimizer,
            runtime=Runtime() if self.runtime is None else read(self.runtime, Runtime),
        )

    def _profiles(self) -> Profiles:
        if self.profiles is not None:
            given: Profiles = read(self.profiles, Profiles)
            return given
        raise documents.DocumentError(
            "--profiles is needed: layers are costed from measured profiles, there are no data sheets to estimate them from"
        )


def _rows(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--global-batch-size takes a number of rows or `{SEARCHED}`, got {text!r}") from None


@dataclass(frozen=True)
class LimitOptions:
    """What plans may use."""

    max_tensor_degree: Annotated[int | None, typer.Option(help="The largest tensor degree to use.")] = None
    max_data_degree: Annotated[int | None, typer.Option(help="The largest data degree to use.")] = None
    max_pipeline_degree: Annotated[int | None, typer.Option(help="The most stages of a pipeline.")] = None
    memory_headroom: Annotated[
        float, typer.Option(help="Share of every device's memory to leave free, for example 0.1.")
    ] = 0.0
    use_nodes: Annotated[str, typer.Option(metavar="NODE,…", help="Plan on these nodes only, by name.")] = ""
    spare: Annotated[str, typer.Option(metavar="NAME,…", help="Leave these nodes or accelerators alone, by name.")] = ""
    objective: Annotated[
        Objective, typer.Option(help="What is least in the best plan: time of an iteration, or cost of a sample.")
    ] = Objective.TIME

    @property
    def limits(self) -> Limits:
        return Limits(
            max_tensor_degree=self.max_tensor_degree,
            max_data_degree=self.max_data_degree,
            max_pipeline_degree=self.max_pipeline_degree,
            memory_headroom_ratio=self.memory_headroom,
            use_nodes=_names(self.use_nodes),
            spare=_names(self.spare),
            objective=self.objective,
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    seed: Annotated[int, typer.Option(help="For searches that draw; the same seed gives the same plans.")] = 0
    budget_seconds: Annotated[
        float | None, typer.Option(help="Stop searching after so long and show the best so far.")
    ] = None
