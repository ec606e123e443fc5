"""Kinds of documents: the value of their field `document`, which stays when a class is renamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

_Noun = TypeVar("_Noun", bound=type)

KINDS: Final[dict[type, str]] = {}
"""Kind of every class that documents are made of."""


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
