"""How a command answers: tables and words for people, JSON for programs, documents into files."""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from trainwright import documents


class Output(StrEnum):
    """For people or for programs."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", help="A table for people or JSON for programs.")]


WIDTH = 80
"""Where the environment says that a terminal has no columns, which would show nothing at all."""


def screen(*, to_error: bool = False) -> Console:
    """Where people read, as wide as their terminal."""
    console = Console(file=sys.stderr if to_error else sys.stdout, highlight=False)
    if console.width < 1:
        console.width = WIDTH
    return console


def show(*parts: Any, to_error: bool = False) -> None:
    """Print tables, texts and lines in the width of the terminal; a table that needs more is not cut off."""
    console = screen(to_error=to_error)
    for part in parts:
        console.print(part, markup=False, crop=False)


def show_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=not _takes_every_sign()))


def _takes_every_sign() -> bool:
    """Whether standard output can show names in any script; what programs read is escaped otherwise."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def note(sentence: str) -> None:
    """Something to know beside the answer, on standard error."""
    typer.echo(f"trainwright: {sentence}", err=True)


def write_document(noun: object, path: Path | None) -> None:
    """A document as JSON into a file, or onto standard output where there is none."""
    if path is None:
        show_json(documents.dump(noun))
        return
    path.write_text(_text(noun), encoding="utf-8")


def replace_document(noun: object, path: Path) -> None:
    """A document as JSON in place of a file's content, which stays whole until the new one is."""
    target = path.resolve()  # where a link leads to, so that it stays one
    new = target.with_name(f".trainwright-{secrets.token_hex(6)}")
    try:
        with new.open("x", encoding="utf-8") as file:
            file.write(_text(noun))
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            new.chmod(target.stat().st_mode)
        new.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        new.unlink(missing_ok=True)


def _text(noun: object) -> str:
    return json.dumps(documents.dump(noun), indent=2, ensure_ascii=False) + "\n"


def refuse_no_place_for(path: Path | None) -> None:
    """Raises OSError where no file can be written: better said before a long search than after it."""
    if path is None:
        return
    if path.is_dir():
        raise _refusal(errno.EISDIR, path)
    if not path.parent.is_dir():
        raise _refusal(errno.ENOENT, path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _refusal(errno.EACCES, path)


def _refusal(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class Format(StrEnum):
    """How a document is written."""

    YAML = "yaml"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--output", help="How to write the document.")]


def show_document(noun: object, form: Format, *, comment: str) -> None:
    """A document on standard output; what was left out stays out. YAML begins with the comment."""
    data = _given(documents.dump(noun))
    if form is Format.JSON:
        show_json(data)
        return
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=_takes_every_sign(), width=120)
    typer.echo(f"# {comment}\n{text}", nl=False)


def _given(data: Any) -> Any:
    """Without the fields that are null, which all have that default."""
    if isinstance(data, dict):
        return {name: _given(value) for name, value in data.items() if value is not None}
    if isinstance(data, list):
        return [_given(value) for value in data]
    return data
