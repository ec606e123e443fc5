"""How a command answers: tables and words for people, JSON for programs, documents into files."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from trainwright import documents


class Output(StrEnum):
    """For people or for programs."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", help="A table for people or JSON for programs.")]


def show(*parts: Any) -> None:
    """Print tables, texts and lines in the width of the terminal."""
    console = Console(file=sys.stdout, highlight=False)
    for part in parts:
        console.print(part, markup=False)


def show_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def note(sentence: str) -> None:
    """Something to know beside the answer, on standard error."""
    typer.echo(f"trainwright: {sentence}", err=True)


def write_document(noun: object, path: Path | None) -> None:
    """A document as JSON into a file, or onto standard output where there is none."""
    text = json.dumps(documents.dump(noun), indent=2, ensure_ascii=False)
    if path is None:
        typer.echo(text)
        return
    path.write_text(text + "\n", encoding="utf-8")
