"""`trainwright schema`: the JSON schema of a document."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainwright import documents
from trainwright.calibration import Trials
from trainwright.cli.framework import command
from trainwright.cli.output import show_json
from trainwright.cluster import Cluster
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.training import Training

DOCUMENTS: dict[str, Any] = {
    "cluster": Cluster,
    "model": Training,
    "profiles": Profiles,
    "plan": Plan,
    "runtime": Runtime,
    "trials": Trials,
    "operators": SpanSpecs,
}
"""Documents that the command line reads and writes, by their names for users."""

app = typer.Typer(add_completion=False)


def document_names(incomplete: str) -> list[str]:
    """Complete a document's name in the shell."""
    return [name for name in DOCUMENTS if name.startswith(incomplete)]


@app.command()
@command
def schema(
    name: Annotated[str, typer.Argument(autocompletion=document_names, help=f"One of {', '.join(DOCUMENTS)}.")],
) -> None:
    """Print the JSON schema of a document."""
    if name not in DOCUMENTS:
        raise documents.DocumentError(f"unknown document {name!r}; choose one of {', '.join(DOCUMENTS)}")
    show_json(documents.schema(DOCUMENTS[name]))
