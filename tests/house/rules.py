"""Rules of layout and prose: each finds its offenders, as `path` or `path:qualified-name`."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from markdown_pages import pages
from source_files import PACKAGES, PROSE_FOLDERS, ROOT, SourceFile, files

MAX_LINES = 500
MAX_FILES_PER_FOLDER = 30
MAX_METHODS = 15

OPENINGS = re.compile(
    r"(Of|As|With|So|Those|By|Whose|What|Whether|Where|Which|Who|Why|How|When|That|Behind|Until|From|For|The same)\b"
)
"""Words that no docstring opens with; ruff's D401 finds functions that open with no verb."""
PHRASES = re.compile(r"\b(behind|so\s+many|so\s+much|(is|are)\s+told|the\s+like)\b", re.IGNORECASE)
COMMENT = re.compile(r"(?:^|\s)#\s(.*)$")
WEAK_NAMES = {"one", "found", "told", "known", "asked", "wanted", "held"}
"""Names that do not say what a variable or parameter is."""
GENERATED = "reference"
"""Folder of pages whose sentences are those of docstrings, which are checked where they stand."""
IMMUTABLE_BASES = {"NamedTuple", "Protocol", "Enum", "StrEnum", "IntEnum", "Flag", "IntFlag"}


def duplicate_modules() -> Iterator[str]:
    """Yield modules that share their name with a folder beside them, which hides them from imports."""
    return (file.name for file in files(*PACKAGES) if file.path.with_suffix("").is_dir())


def duplicate_classes() -> Iterator[str]:
    """Yield classes that share their name with another one of their folder; layers may."""
    by_name = defaultdict(list)
    for file in files(*PACKAGES):
        for name in () if "layers" in file.path.parts else file.classes:
            by_name[file.path.parent, name].append(f"{file.name}:{name}")
    for same in by_name.values():
        yield from same if len(same) > 1 else ()


def large_classes() -> Iterator[str]:
    """Yield classes of more than 15 methods, properties included."""
    for file in files(*PACKAGES):
        yield from (f"{file.name}:{name}" for name, methods in file.classes.items() if methods > MAX_METHODS)


def long_files() -> Iterator[str]:
    """Yield files of more than 500 non-blank lines."""
    return (file.name for file in files(*PACKAGES) if file.lines > MAX_LINES)


def full_folders() -> Iterator[str]:
    """Yield folders with more than 30 Python files."""
    count = Counter(file.path.parent for file in files(*PACKAGES))
    return (folder.relative_to(ROOT).as_posix() for folder, number in count.items() if number > MAX_FILES_PER_FOLDER)


def mutable_classes() -> Iterator[str]:
    """Yield classes in the operator's `flow/` that are no frozen dataclass, named tuple, enum, protocol or exception."""
    found = [
        (file, node)
        for file in files(PACKAGES[1])
        if "flow" in file.path.parts
        for node in file.parse().body
        if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: {_last_name(base) for base in node.bases} for _, node in found}
    for file, node in found:
        if not _is_frozen(node) and not _is_immutable(node.name, bases):
            yield f"{file.name}:{node.name}"


def _is_frozen(node: ast.ClassDef) -> bool:
    return any(
        isinstance(decorator, ast.Call)
        and _last_name(decorator.func) == "dataclass"
        and any(
            word.arg == "frozen" and isinstance(word.value, ast.Constant) and word.value.value is True
            for word in decorator.keywords
        )
        for decorator in node.decorator_list
    )


def _is_immutable(name: str, bases: dict[str, set[str]]) -> bool:
    return any(
        base in IMMUTABLE_BASES or base.endswith(("Error", "Exception")) or _is_immutable(base, bases)
        for base in bases.get(name, ())
    )


def _last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def docstring_openings() -> Iterator[str]:
    """Yield modules, classes and functions whose docstring opens with one of the words."""
    for file in files(*PROSE_FOLDERS):
        yield from (file.place(one) for one in file.definitions if OPENINGS.match(one.docstring))


def forbidden_phrases() -> Iterator[str]:
    """Yield where docstrings, comments, messages and Markdown have one of the phrases."""
    for file in files(*PROSE_FOLDERS):
        if file.path != Path(__file__) and PHRASES.search(file.text):
            lines = {*_lines_of_strings(file), *_lines_of_comments(file)}
            yield from sorted({file.place_of(line) for line in lines})
    for page in pages():
        if page.path.parent.name != GENERATED and PHRASES.search(page.text):
            yield page.name


def _lines_of_strings(file: SourceFile) -> Iterator[int]:
    for node in ast.walk(file.parse()):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and PHRASES.search(node.value)
        ):
            yield node.lineno


def _lines_of_comments(file: SourceFile) -> Iterator[int]:
    for number, line in enumerate(file.text.splitlines(), 1):
        comment = COMMENT.search(line)
        if comment and PHRASES.search(comment[1]):
            yield number


def weak_names() -> Iterator[str]:
    """Yield where a variable or parameter has one of the names that do not say what it is, as `path:definition=name`."""
    for file in files(*PACKAGES):
        if any(name in file.text for name in WEAK_NAMES):
            weak = ((line, name) for line, name in _bound_names(file.parse()) if name in WEAK_NAMES)
            yield from sorted({f"{file.place_of(line)}={name}" for line, name in weak})


def _bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


RULES: dict[str, Callable[[], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        duplicate_modules,
        duplicate_classes,
        large_classes,
        long_files,
        full_folders,
        mutable_classes,
        docstring_openings,
        forbidden_phrases,
        weak_names,
    )
}
