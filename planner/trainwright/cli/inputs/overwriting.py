"""Guard of the files that a command reads: none of its options may write into one of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, Final, get_args

from typer.models import ArgumentInfo, OptionInfo


class _Written:
    """Type of the mark in `Annotated[Path, option, WRITTEN]`."""


WRITTEN: Final = _Written()
"""Mark of a path that a command writes; it reads all others."""


def refuse_overwriting(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Raise ValueError where a command would write into a file that it reads, or into one file twice."""
    read: list[tuple[str, Path]] = []
    written: list[tuple[str, Path]] = []
    for name, parameter in parameters.items():
        uses = written if WRITTEN in get_args(parameter.annotation) else read
        uses += [(_as_typed(parameter), path) for path in _paths(given.get(name))]
    for target, path in written:
        for source, other in read:
            if _is_same_file(path, other):
                raise ValueError(
                    f"{target}: would overwrite the file that {source} reads, got {path}; write into another file"
                )
    for (target, path), (second, other) in combinations(written, 2):
        if _is_same_file(path, other):
            raise ValueError(
                f"{target}: writes into the same file as {second}, got {path}; give each a file of its own"
            )


def _paths(value: Any) -> Iterator[Path]:
    for item in value if isinstance(value, list) else (value,):
        if isinstance(item, Path):
            yield item


def _as_typed(parameter: inspect.Parameter) -> str:
    """Name an option or argument the way people type it."""
    for info in get_args(parameter.annotation):
        if isinstance(info, ArgumentInfo):
            return str(info.metavar or parameter.name.upper())
        if isinstance(info, OptionInfo) and isinstance(info.default, str):
            return info.default
    return f"--{parameter.name.replace('_', '-')}"


def _is_same_file(path: Path, other: Path) -> bool:
    """Compare through links; a terminal or a pipe never matches, since writing to it destroys nothing."""
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)
    return os.path.realpath(path) == os.path.realpath(other)
