"""The papers' tables by name, and one way to rebuild them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from trainwright.bench.amp_methods import methods
from trainwright.bench.amp_search_seconds import search_seconds
from trainwright.bench.amp_trials import trials
from trainwright.bench.comparison import Comparison, Tell
from trainwright.bench.figures import galvatron_figures
from trainwright.bench.galvatron_balance import balance
from trainwright.bench.galvatron_settings import EIGHT_TITAN, SIXTEEN_A100, SIXTEEN_TITAN, SIXTY_FOUR_A100
from trainwright.bench.galvatron_throughput import throughput


class Rebuild(Protocol):
    """Rebuilds one table, telling what it is at."""

    def __call__(self, *, tell: Tell) -> Comparison: ...


def _eight(*, tell: Tell) -> Comparison:
    return throughput("galvatron-2", {EIGHT_TITAN: galvatron_figures().eight_titan}, tell=tell)


def _sixteen(*, tell: Tell) -> Comparison:
    figures = galvatron_figures()
    tables = {SIXTEEN_TITAN: figures.sixteen_titan, SIXTEEN_A100: figures.sixteen_a100}
    return throughput("galvatron-3", tables, tell=tell)


def _sixty_four(*, tell: Tell) -> Comparison:
    return throughput("galvatron-5", {SIXTY_FOUR_A100: galvatron_figures().sixty_four_a100}, tell=tell)


TABLES: Mapping[str, Rebuild] = {
    "amp-2": search_seconds,
    "amp-3": partial(methods, "homogeneous", "3"),
    "amp-4": partial(methods, "mixed_cluster", "4"),
    "amp-5": partial(methods, "mixed_model", "5"),
    "amp-trials": trials,
    "galvatron-2": _eight,
    "galvatron-3": _sixteen,
    "galvatron-4": balance,
    "galvatron-5": _sixty_four,
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
