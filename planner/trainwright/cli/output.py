"""Output of commands: tables for people, JSON for programs, documents in files."""

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
from trainwright.outside.plain_text import plain_text


class Output(StrEnum):
    """Output for people or for programs."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", help="A table for people or JSON for programs.")]


WIDTH = 80
"""Width for an environment that claims zero columns, which would show nothing."""


def screen(*, to_error: bool = False) -> Console:
    """Return a console on standard output or standard error, as wide as the terminal."""
    console = Console(file=sys.stderr if to_error else sys.stdout, highlight=False)
    if console.width < 1:
        console.width = WIDTH
    return console


def show(*parts: Any, to_error: bool = False, wraps: bool = True) -> None:
    """Print tables, texts and lines at the terminal's width, without cutting off wider tables.

    `wraps`: whether to wrap lines, which would break URLs.
    """
    console = screen(to_error=to_error)
    for part in parts:
        console.print(part, markup=False, crop=False, soft_wrap=not wraps)


def show_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=not _takes_every_sign()))


def _takes_every_sign() -> bool:
    """Return True if standard output can encode every script; documents are escaped otherwise."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def note(sentence: str) -> None:
    """Print a remark on standard error, separate from the answer."""
    typer.echo(f"trainwright: {plain_text(sentence)}", err=True)


def write_document(noun: object, path: Path | None) -> None:
    """Write a document as JSON into a file, or to standard output without a path."""
    if path is None:
        show_json(documents.dump(noun))
        return
    path.write_text(_text(noun), encoding="utf-8")


def replace_document(noun: object, path: Path) -> None:
    """Replace a file atomically by a document as JSON."""
    target = path.resolve()  # follow a link, so that it stays a link
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


def check_writable(path: Path | None) -> None:
    """Raise OSError if the file cannot be written: before a long search, not after it."""
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
    """Format of a document on standard output."""

    YAML = "yaml"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--output", help="How to write the document.")]


def show_document(noun: object, form: Format, *, comment: str) -> None:
    """Print a document without its null fields; YAML begins with the comment."""
    data = _given(documents.dump(noun))
    if form is Format.JSON:
        show_json(data)
        return
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=_takes_every_sign(), width=120)
    typer.echo(f"# {comment}\n{text}", nl=False)


def _given(data: Any) -> Any:
    """Drop null fields, all of which default to null."""
    if isinstance(data, dict):
        return {name: _given(value) for name, value in data.items() if value is not None}
    if isinstance(data, list):
        return [_given(value) for value in data]
    return data
