"""Registry of the papers' tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from trainwright_papers.alpa_scaling import scaling_table
from trainwright_papers.amp_methods import methods_table
from trainwright_papers.amp_search_seconds import search_seconds_table
from trainwright_papers.amp_trials import trials_table
from trainwright_papers.comparison import Comparison, ReportProgress
from trainwright_papers.galvatron_balance import partition_balance_table
from trainwright_papers.galvatron_settings import EIGHT_TITAN, SIXTEEN_A100, SIXTEEN_TITAN, SIXTY_FOUR_A100
from trainwright_papers.galvatron_throughput import throughput_table
from trainwright_papers.published import galvatron_figures


class TableBuilder(Protocol):
    """Function that rebuilds one table and reports its progress."""

    def __call__(self, *, report_progress: ReportProgress) -> Comparison: ...


def _galvatron_2(*, report_progress: ReportProgress) -> Comparison:
    figures = galvatron_figures()
    return throughput_table("galvatron-2", {EIGHT_TITAN: figures.eight_titan}, report_progress=report_progress)


def _galvatron_3(*, report_progress: ReportProgress) -> Comparison:
    figures = galvatron_figures()
    published = {SIXTEEN_TITAN: figures.sixteen_titan, SIXTEEN_A100: figures.sixteen_a100}
    return throughput_table("galvatron-3", published, report_progress=report_progress)


def _galvatron_5(*, report_progress: ReportProgress) -> Comparison:
    figures = galvatron_figures()
    return throughput_table("galvatron-5", {SIXTY_FOUR_A100: figures.sixty_four_a100}, report_progress=report_progress)


TABLES: Mapping[str, TableBuilder] = {
    "alpa-6": partial(scaling_table, "alpa-6"),
    "alpa-7": partial(scaling_table, "alpa-7"),
    "alpa-8": partial(scaling_table, "alpa-8"),
    "amp-2": search_seconds_table,
    "amp-3": partial(methods_table, "homogeneous", "3"),
    "amp-4": partial(methods_table, "mixed_cluster", "4"),
    "amp-5": partial(methods_table, "mixed_model", "5"),
    "amp-trials": trials_table,
    "galvatron-2": _galvatron_2,
    "galvatron-3": _galvatron_3,
    "galvatron-4": partition_balance_table,
    "galvatron-5": _galvatron_5,
}


def rebuild_tables(names: Sequence[str], report_progress: ReportProgress) -> Iterator[Comparison]:
    """Rebuild the named tables one after the other, or all of them if `names` is empty.

    Raises ValueError for an unknown name.
    """
    for name in names:
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; choose among {', '.join(TABLES)}")
    for name in names or TABLES:
        yield TABLES[name](report_progress=report_progress)
