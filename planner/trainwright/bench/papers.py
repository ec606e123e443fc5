"""The papers' tables by name, and one way to rebuild them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from trainwright.bench.amp_methods import methods
from trainwright.bench.amp_search_seconds import search_seconds
from trainwright.bench.amp_trials import trials
from trainwright.bench.comparison import Comparison, Tell


class Rebuild(Protocol):
    """Rebuilds one table, telling what it is at."""

    def __call__(self, *, tell: Tell) -> Comparison: ...


TABLES: Mapping[str, Rebuild] = {
    "amp-2": search_seconds,
    "amp-3": partial(methods, "homogeneous", "3"),
    "amp-4": partial(methods, "mixed_cluster", "4"),
    "amp-5": partial(methods, "mixed_model", "5"),
    "amp-trials": trials,
}


def rebuilt(names: Sequence[str], tell: Tell) -> Iterator[Comparison]:
    """These tables, all where none is named, one after the other.

    Raises ValueError for a name that is not known.
    """
    for name in names:
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; choose among {', '.join(TABLES)}")
    for name in names or TABLES:
        yield TABLES[name](tell=tell)
