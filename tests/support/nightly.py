"""The choice between what `make test` runs and what only `make test-nightly` runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def quick_first(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the values as parameters of a test, all but the quick ones marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def covering(candidates: Sequence[T], traits: Callable[[T], Collection[Hashable]]) -> list[T]:
    """Return few of the candidates that together have every trait of all candidates.

    Greedy: the next is the first of those that add most traits.
    """
    of_each = [set(traits(one)) for one in candidates]
    missing, chosen = set[Hashable]().union(*of_each), set[int]()
    while missing:
        number = max(range(len(candidates)), key=lambda one: len(of_each[one] & missing))
        chosen.add(number)
        missing -= of_each[number]
    return [candidates[number] for number in sorted(chosen)]
