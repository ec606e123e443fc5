"""`trainwright schema`: what may stand in a document."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainwright import documents
from trainwright.cli.answers import show_json
from trainwright.cli.command import command
from trainwright.cluster import Cluster
from trainwright.fitting import Trials
from trainwright.operator_specs import SpanSpecs
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
"""The documents that the command line reads and writes, by the name that people know them under."""

app = typer.Typer(add_completion=False)


def document_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in DOCUMENTS if name.startswith(incomplete)]


@app.command()
@command
def schema(
    name: Annotated[str, typer.Argument(autocompletion=document_names, help=f"One of {', '.join(DOCUMENTS)}.")],
) -> None:
    """Print the JSON schema of a document."""
    if name not in DOCUMENTS:
        raise documents.DocumentError(f"there is no document {name!r}; choose one of {', '.join(DOCUMENTS)}")
    show_json(documents.schema(DOCUMENTS[name]))
