"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trainwright.cost.estimate import Breakdown, Estimate
from trainwright.plan import Plan
from trainwright.report import degrees, units
from trainwright.report.origin import origin_words
from trainwright.search import Candidate, Objective, Problem

WIDEST_WHOLE = 32
"""Lines of layers up to so many characters are not broken where others stand beside them."""
NARROWEST_BROKEN = 12
"""A column that may be broken keeps so many characters in a terminal that is too narrow for the table."""
_WIDEST = 10_000
"""Of a terminal."""


class _Whole(Table):
    """A table that is wider than a terminal which is too narrow for its columns: Rich would drop some of them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(width=_WIDEST), self).minimum
        yield from super().__rich_console__(console, options.update(width=max(options.max_width, needed)))


def new_table(columns: Sequence[tuple[str, str]]) -> Table:
    """A plain table; columns are (heading, `left`, `right` or `whole`: left and never broken).

    Cells are texts, because names may look like markup.
    """
    table = _Whole(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading, justify in columns:
        right = justify == "right"
        table.add_column(
            Text(heading), justify="right" if right else "left", no_wrap=justify != "left", overflow="fold"
        )
    _keep_widths(table, [heading for heading, _ in columns])
    return table


def titled(title: str, table: Table, caption: str = "") -> Group:
    """A table between its title and a caption, which may be wider than the table."""
    below = [Text(caption, style="dim")] if caption else []
    return Group(Text(title, style="bold"), Text(), table, Text(), *below)


def add_row(table: Table, *cells: str, style: str = "") -> None:
    _keep_widths(table, cells)
    table.add_row(*(Text(cell, style=style) for cell in cells))


def _keep_widths(table: Table, cells: Sequence[str]) -> None:
    """Where a table is wider than the terminal, Rich would cut units off and drop whole columns."""
    for column, cell in zip(table.columns, cells, strict=True):
        if column.no_wrap:
            needed = max(map(cell_len, cell.split("\n")))
        else:
            needed = min(NARROWEST_BROKEN, max(map(cell_len, cell.split()), default=0))
        column.min_width = max(column.min_width or 0, needed)


def candidate_table(candidates: Sequence[Candidate], problem: Problem, *, planner: str, searched: float) -> Group:
    """Candidates, best first; says so where devices are emulated or profiles estimated.

    Columns that say nothing are left out: the batch where it is the one asked for, sharding where nothing is sharded,
    prices where plans are sought for time alone. Unequal stages stand one below the other.
    """
    batch_differs = any(candidate.plan.global_batch_size != problem.global_batch_size for candidate in candidates)
    saves = any(degrees.savings(candidate.plan) for candidate in candidates)
    costs = problem.limits.objective is not Objective.TIME
    cells_of = [degrees.lines(candidate.plan, problem.cluster) for candidate in candidates]
    headings = [
        ("rank", "right"),
        *([("batch", "right")] if batch_differs else []),
        ("iteration", "right"),
        *([("cost/1000", "right")] if costs else []),
        ("rows/s", "right"),
        ("memory", "right"),
        ("degrees", "whole"),
        ("batches", "whole"),
        ("layers by stage", _layers_column([told[2] for told in cells_of])),
        *([("saves by", "left")] if saves else []),
    ]
    table = new_table(headings)
    for number, (candidate, told) in enumerate(zip(candidates, cells_of, strict=True), 1):
        estimate, plan = candidate.estimate, candidate.plan
        cost = candidate.price_per_row
        cells = [
            str(number),
            *([str(plan.global_batch_size)] if batch_differs else []),
            units.seconds(estimate.iteration_seconds),
            *(["?" if cost is None else units.money(1000 * cost)] if costs else []),
            units.rate(rows_per_second(plan, estimate)),
            units.size(estimate.peak_memory_bytes),
            *told,
            *([degrees.savings(plan)] if saves else []),
        ]
        add_row(table, *cells, style="bold" if number == 1 else "")
    front = problem.limits.objective is Objective.PARETO
    return titled(
        f"{'Front of time and cost' if front else 'Candidates'} of {planner}{origin_words(problem)}",
        table,
        f"predicted, not measured; searched for {units.seconds(searched)}; {degrees.DEGREES}; {degrees.BATCHES}",
    )


def _layers_column(cells: Sequence[str]) -> str:
    """Lines that stand beside those of other columns are not broken, unless they are long."""
    lines = [cell.split("\n") for cell in cells]
    beside = any(len(one) > 1 for one in lines)
    return "whole" if beside and max(map(len, chain.from_iterable(lines))) <= WIDEST_WHOLE else "left"


def rows_per_second(plan: Plan, estimate: Estimate) -> float:
    """Throughput."""
    return plan.global_batch_size / estimate.iteration_seconds if estimate.iteration_seconds else float("inf")


def breakdown_table(estimate: Estimate, plan: Plan, problem: Problem) -> Group:
    """Where the critical device's time goes."""
    table = new_table([("part", "left"), ("time", "right"), ("share", "right")])
    for field in fields(Breakdown):
        spent = getattr(estimate.breakdown, field.name)
        name = field.name.removesuffix("_seconds").replace("_", " ")
        add_row(table, name, units.seconds(spent), units.share(spent, estimate.iteration_seconds))
    table.add_section()
    add_row(table, "iteration", units.seconds(estimate.iteration_seconds), "", style="bold")
    add_row(table, "peak memory", units.size(estimate.peak_memory_bytes), "")
    return titled(f"{plan.summary()} on {estimate.critical_device}{origin_words(problem)}", table)
