"""Kinds of documents: the value of their field `document`, which stays when a class is renamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any, Final, TypeVar

_Noun = TypeVar("_Noun", bound=type)

KINDS: Final[dict[type, str]] = {}
"""Kind of every class that documents are made of."""

TAKEN_BY: Final[Mapping[str, str]] = {
    "Cluster": "--cluster",
    "Training": "--model",
    "Profiles": "--profiles",
    "Plan": "--plan",
    "Runtime": "--runtime",
    "Trials": "--trials",
    "Candidates": "--candidates",
}
"""Option of the command line that takes a document, by its kind."""


def document(kind: str) -> Callable[[_Noun], _Noun]:
    """Declare the kind of a noun's documents; stored objects carry it, so it never changes."""

    def declare(noun: _Noun) -> _Noun:
        KINDS[noun] = kind
        return noun

    return declare


def kind_of(noun: type) -> str:
    """Return the kind of a noun's documents. Raise TypeError for a class that declares none; it inherits none either."""
    if noun not in KINDS:
        raise TypeError(f"{noun.__qualname__}: no document kind; put @document above its @dataclass")
    return KINDS[noun]


def kind_by_fields(given: AbstractSet[Any], expected: AbstractSet[str]) -> str | None:
    """Return the kind that users write and that has all the given fields; None where all of them are expected ones."""
    if given <= expected:
        return None
    fields_by_kind = {kind: {field.name for field in fields(noun)} for noun, kind in KINDS.items() if kind in TAKEN_BY}
    return next((kind for kind, names in fields_by_kind.items() if given <= names), None)
