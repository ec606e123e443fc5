"""Python files of the project, parsed once for all guards."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("planner/trainwright", "operator/trainwright_operator", "profiler-image/trainwright_worker")
"""Import packages that the layout is checked in, and whose lines `make lines` counts."""
PROSE_FOLDERS = (*PACKAGES, "deploy", "benchmarks", "tests")
Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A class or function; the module itself has an empty name."""

    name: str
    first_line: int
    last_line: int
    docstring: str


@dataclass(frozen=True)
class SourceFile:
    """A Python file. Its tree is not kept: kept trees slow down every garbage collection of a test run."""

    path: Path

    @property
    def name(self) -> str:
        """Path from the project's root."""
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> int:
        """Number of non-blank lines."""
        return sum(1 for line in self.text.splitlines() if line.strip())

    def parse(self) -> ast.Module:
        """Return a new tree."""
        is_enabled = gc.isenabled()
        gc.disable()  # a tree has no garbage, and looking for some takes four times as long as parsing
        try:
            return ast.parse(self.text)
        finally:
            if is_enabled:
                gc.enable()

    @cached_property
    def _found(self) -> tuple[tuple[Definition, ...], dict[str, int]]:
        tree = self.parse()
        classes = {node.name: _count_methods(node) for node in tree.body if isinstance(node, ast.ClassDef)}
        return tuple(_definitions(tree, "")), classes

    @property
    def definitions(self) -> tuple[Definition, ...]:
        """The module, its classes and functions, nested ones included."""
        return self._found[0]

    @property
    def classes(self) -> dict[str, int]:
        """Names of the classes at the top of the module, each with its number of methods and properties."""
        return self._found[1]

    def place(self, definition: Definition) -> str:
        """Return `path:qualified-name`, or the path of the module itself."""
        return f"{self.name}:{definition.name}" if definition.name else self.name

    def place_of(self, line: int) -> str:
        """Return the place of the innermost definition around a line."""
        around = [one for one in self.definitions if one.first_line <= line <= one.last_line]
        return self.place(min(around, key=lambda one: one.last_line - one.first_line))


def _count_methods(node: ast.ClassDef) -> int:
    return len({each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)})


def _definitions(node: Node, name: str) -> Iterator[Definition]:
    docstring = ast.get_docstring(node, clean=False) or ""
    is_module = isinstance(node, ast.Module)
    yield Definition(name, *((0, sys.maxsize) if is_module else (node.lineno, node.end_lineno)), docstring)
    for inner in _inside(node.body):
        yield from _definitions(inner, f"{name}.{inner.name}" if name else inner.name)


def _inside(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _inside(getattr(node, part, ()))


@cache
def files(*folders: str) -> tuple[SourceFile, ...]:
    """Return the Python files under folders of the project, sorted by path; each is parsed once."""
    return tuple(_file(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def _file(path: Path) -> SourceFile:
    return SourceFile(path)


if __name__ == "__main__":
    for package in PACKAGES:
        found = files(package)
        print(f"{package}: {len(found)} files, {sum(file.lines for file in found):,} non-blank lines")  # noqa: T201
    every = files(*PACKAGES)
    print(f"together: {len(every)} files, {sum(file.lines for file in every):,} non-blank lines")  # noqa: T201
