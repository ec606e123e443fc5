"""Terminal tables of candidates, units, origin marks and the Pareto plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainwright.cluster import Cluster
from trainwright.cost.estimate import Estimate
from trainwright.plan import Plan
from trainwright.report import plan_summary
from trainwright.report.cost import cost_legend, is_priced, run_columns
from trainwright.report.divided_table import DividedTable
from trainwright.report.memory_fit import FITS, fit_columns
from trainwright.report.plan_figures import FIGURES, PlanFigures, figure_columns
from trainwright.report.units import money, seconds
from trainwright.search import Candidate, Objective, Problem


def origin_words(problem: Problem) -> str:
    """Return a suffix for titles, ` (device times emulated, profiles estimated)`; empty if neither applies."""
    marks = [
        *(["device times emulated"] if problem.cluster.is_emulated else []),
        *(["profiles estimated"] if problem.profiles.origin == "estimated" else []),
    ]
    return f" ({', '.join(marks)})" if marks else ""


def origin_fields(problem: Problem) -> dict[str, str]:
    """Return the origin of the profiles for JSON output; empty unless they are estimated."""
    return {"profiles": problem.profiles.origin} if problem.profiles.origin == "estimated" else {}


HEIGHT, WIDEST, NARROWEST = 10, 60, 20
MARKS = "123456789abcdefghijklmnopqrstuvwxyz"
"""Marks of the ranks; further ranks are stars."""


def pareto_plot(candidates: Sequence[Candidate], width: int) -> Text:
    """Draw each candidate's rank at its iteration time (x) and the cost of 1000 rows (y).

    A better rank hides a worse one at the same place. Raises ValueError where a candidate has no price.
    """
    points = [(candidate.estimate.iteration_seconds, _cost(candidate)) for candidate in candidates]
    times, costs = ([point[axis] for point in points] for axis in (0, 1))
    top, bottom = money(max(costs)), money(min(costs))
    margin = max(len(top), len(bottom))
    cells = max(min(WIDEST, width - margin - 2), NARROWEST)
    grid = [[" "] * cells for _ in range(HEIGHT)]
    for rank, (iteration_seconds, cost) in reversed(list(enumerate(points))):
        column = _place(iteration_seconds, times, cells)
        grid[HEIGHT - 1 - _place(cost, costs, HEIGHT)][column] = MARKS[rank] if rank < len(MARKS) else "*"
    picture = Text("cost of 1000 rows, in the cluster's currency\n", style="dim")
    for number, row in enumerate(grid):
        label = top if number == 0 else bottom if number == HEIGHT - 1 else ""
        picture.append(f"{label:>{margin}} │", style="dim")
        picture.append("".join(row).rstrip() + "\n")
    first, last = seconds(min(times)), seconds(max(times))
    picture.append(f"{'':>{margin}} └{'─' * cells}\n", style="dim")
    picture.append(f"{'':>{margin}}  {first}{last:>{max(cells - len(first), len(last) + 1)}}\n", style="dim")
    picture.append(f"{'':>{margin}}  {'iteration':^{cells}}".rstrip(), style="dim")
    return picture


def _place(value: float, values: Sequence[float], cells: int) -> int:
    least, most = min(values), max(values)
    return round((value - least) / (most - least) * (cells - 1)) if most > least else 0


def _cost(candidate: Candidate) -> float:
    if candidate.price_per_row is None:
        raise ValueError("a front of time and cost needs the price of every accelerator that a candidate uses")
    return 1000 * candidate.price_per_row


def new_table(columns: Sequence[tuple[str, str]]) -> Table:
    """Return an empty table with columns (heading, `left`, `right` or `whole`: left and not broken where it fits).

    Where it is wider than the terminal, the last columns are in further tables below, which repeat the first one.
    """
    table = DividedTable()
    for heading, justify in columns:
        table.add_column(
            Text(heading), justify="right" if justify == "right" else "left", no_wrap=justify != "left", overflow="fold"
        )
    return table


def titled(title: str, table: Table, caption: str = "") -> Group:
    """Return the table between its title and a caption, which may be wider than the table."""
    below = [Text(caption, style="dim")] if caption else []
    return Group(Text(title, style="bold"), Text(), table, Text(), *below)


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of texts: names may look like markup."""
    table.add_row(*(Text(cell, style=style) for cell in cells))


def candidate_table(candidates: Sequence[Candidate], problem: Problem, *, planner: str, searched: float) -> Group:
    """Return candidates, best first, as a table of their figures and one of their plans.

    They are marked where devices are emulated or profiles estimated. Columns without information are left out: the batch if it
    is the requested one, savings if nothing is saved, `fits` if all surely do, prices if the objective is time. Each group of
    uniform stages takes one line.
    """
    front = problem.limits.objective is Objective.PARETO
    title = f"{'Front of time and cost' if front else 'Candidates'} of {planner}{origin_words(problem)}"
    legend = f"predicted, not measured; searched for {seconds(searched)}; {FIGURES}"
    if fit_columns(candidates, problem):
        legend += f"; {FITS}"
    if is_priced(problem):
        legend += f"; {cost_legend(problem)}"
    plans = [candidate.plan for candidate in candidates]
    return Group(
        titled(title, _figures_table(candidates, problem), legend),
        Text(),
        plans_table(plans, problem),
        Text(),
        Text(plan_summary.legend(plans, problem.cluster), style="dim"),
    )


def _figures_table(candidates: Sequence[Candidate], problem: Problem) -> Table:
    batch_differs = any(candidate.plan.global_batch_size != problem.global_batch_size for candidate in candidates)
    costs, columns, of_run = is_priced(problem), figure_columns(problem), run_columns(problem)
    fits = fit_columns(candidates, problem)
    table = new_table(
        [
            ("rank", "right"),
            *((heading, "right") for heading, _ in (*columns, *fits)),
            *([("batch", "right")] if batch_differs else []),
            *([("cost", "right")] if costs else []),
            *((heading, "right") for heading, _ in of_run),
        ]
    )
    for number, candidate in enumerate(candidates, 1):
        figures, cost = PlanFigures.of(candidate, problem), candidate.price_per_row
        cells = [
            str(number),
            *(cell(figures) for _, cell in columns),
            *(cell(candidate) for _, cell in fits),
            *([str(candidate.plan.global_batch_size)] if batch_differs else []),
            *(["?" if cost is None else f"{1000 * cost:.3g}"] if costs else []),
            *(cell(candidate) for _, cell in of_run),
        ]
        add_row(table, *cells, style="bold" if number == 1 else "")
    return table


def plans_table(plans: Sequence[Plan], problem: Problem, *, bold: int | None = 0) -> Table:
    """Return plans by rank, a line for each group of uniform stages; that number `bold` is shown in bold.

    Plans that would read alike are written layer by layer. Columns without information are left out: pipelines if every plan
    has one, nodes if the cluster has one.
    """
    saves = any(map(plan_summary.savings, plans))
    headings = plan_headings(plans, problem.cluster)
    table = new_table([("rank", "right"), *headings.values(), *([("saves by", "left")] if saves else [])])
    for number, (plan, cells) in enumerate(zip(plans, _distinct_cells(plans, problem), strict=True)):
        columns = [getattr(cells, name).split("\n") for name in headings]
        savings = plan_summary.savings(plan)
        if saves:
            is_long = len(columns[0]) > 1
            columns.append(savings.replace(", ", ",\n").split("\n") if is_long else [savings])
        # One row per line: where the terminal breaks a line, those of the other columns stay beside theirs.
        for row in zip_longest([str(number + 1)], *columns, fillvalue=""):
            add_row(table, *row, style="bold" if number == bold else "")
    return table


def plan_headings(plans: Sequence[Plan], cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Return the columns of plans by the name of their cell, without those that say nothing."""
    several = any(len(plan.pipelines) > 1 for plan in plans)
    return {
        **({"pipelines": ("pipeline", "whole")} if several else {}),
        "degrees": ("degrees", "whole"),
        "batches": ("batches", "whole"),
        "layers": ("layers by stage", "left"),
        **({"nodes": ("nodes", "left")} if len(cluster.nodes) > 1 else {}),
    }


def _distinct_cells(plans: Sequence[Plan], problem: Problem) -> list[plan_summary.PlanLines]:
    """Return the cells of the plans; where rows would look the same, with the least detail that separates most of them."""
    cells_by_plan = [plan_summary.lines(plan, problem.cluster) for plan in plans]
    alike: dict[object, list[int]] = {}
    for number, plan in enumerate(plans):
        alike.setdefault((cells_by_plan[number], plan_summary.savings(plan)), []).append(number)
    for numbers in (same for same in alike.values() if len(same) > 1):
        ways = [
            [plan_summary.lines(plans[number], problem.cluster, detail) for number in numbers]
            for detail in plan_summary.Detail
        ]
        for number, cells in zip(numbers, max(ways, key=lambda way: len(set(way))), strict=True):
            cells_by_plan[number] = cells
    return cells_by_plan


def rows_per_second(plan: Plan, estimate: Estimate) -> float:
    return plan.global_batch_size / estimate.iteration_seconds if estimate.iteration_seconds else float("inf")
