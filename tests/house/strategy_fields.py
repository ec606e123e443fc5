"""Files that know single fields of a layer's strategy: `python tests/house/strategy_fields.py` lists them.

A function or property that only returns the field is another name for it, so its readers count too. `torch.tensor` is no field.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from source_files import PACKAGES, SourceFile, files

LAYERS = "profiler-image/trainwright_worker/layers/"
"""The worker's layers compute with sequence parallelism, so they are not counted."""


def files_naming_sequence_parallel() -> list[str]:
    """Return the files whose text contains `sequence_parallel`, or that use another name for the field."""
    return _files_with("sequence_parallel", lambda file, names: any(name in file.text for name in names))


def files_reading_tensor() -> list[str]:
    """Return the files with the attribute `.tensor`, or with another name for it."""
    return _files_with("tensor", _reads)


def _files_with(field: str, uses: Callable[[SourceFile, set[str]], bool]) -> list[str]:
    every = files(*PACKAGES)
    names = {field} | {alias for file in every if f".{field}" in file.text for alias in _aliases(file, field)}
    return [file.name for file in every if uses(file, names) and not file.name.startswith(LAYERS)]


def _reads(file: SourceFile, names: set[str]) -> bool:
    if not any(f".{name}" in file.text for name in names):
        return False
    return any(
        isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node) != "torch.tensor"
        for node in ast.walk(file.parse())
    )


def _aliases(file: SourceFile, field: str) -> set[str]:
    """Return the functions and properties that only return the field."""
    return {
        node.name
        for node in ast.walk(file.parse())
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.body[-1], ast.Return)
        and isinstance(node.body[-1].value, ast.Attribute)
        and node.body[-1].value.attr == field
    }


if __name__ == "__main__":
    for title, found in (
        ("sequence_parallel", files_naming_sequence_parallel()),
        (".tensor", files_reading_tensor()),
    ):
        print(f"{title}: {len(found)} files", *found, sep="\n  ")  # noqa: T201
