"""Finding things by the many names that people and nodes have for them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")

MOST_NAMES_SHOWN = 3


def plain(name: str) -> str:
    """A name without case and separators: `Tesla T4`, `tesla-t4` and `Tesla_T4` are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find(name: str, known: Mapping[str, T], what: str) -> T:
    """The thing of that name among things by their plain names.

    Raises ValueError with the nearest names where there is none.
    """
    found = known.get(plain(name))
    if found is None:
        near = get_close_matches(plain(name), known, n=len(known), cutoff=0.4)
        labels = dict.fromkeys(str(known[alias]) for alias in near)
        shown = list(labels)[:MOST_NAMES_SHOWN] or sorted({str(item) for item in known.values()})
        raise ValueError(
            f"there is no data sheet of {what} {name!r}; name one that has one, such as {', '.join(shown)}"
        )
    return found
