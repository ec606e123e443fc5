"""A front of time and cost, drawn with letters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from trainwright.report import units
from trainwright.search import Candidate

HEIGHT, WIDEST, NARROWEST = 10, 60, 20
MARKS = "123456789abcdefghijklmnopqrstuvwxyz"
"""By rank; further ones are stars."""


def front_plot(candidates: Sequence[Candidate], width: int) -> Text:
    """Every candidate at its iteration time (to the right) and the cost of 1000 rows (upwards), by its rank.

    Where two fall on one place the better rank is drawn. Raises ValueError where a candidate has no price.
    """
    points = [(one.estimate.iteration_seconds, _cost(one)) for one in candidates]
    times, costs = ([point[axis] for point in points] for axis in (0, 1))
    top, bottom = units.money(max(costs)), units.money(min(costs))
    margin = max(len(top), len(bottom))
    cells = max(min(WIDEST, width - margin - 2), NARROWEST)
    grid = [[" "] * cells for _ in range(HEIGHT)]
    for rank, (seconds, cost) in reversed(list(enumerate(points))):
        column = _place(seconds, times, cells)
        grid[HEIGHT - 1 - _place(cost, costs, HEIGHT)][column] = MARKS[rank] if rank < len(MARKS) else "*"
    picture = Text("cost of 1000 rows, in the cluster's currency\n", style="dim")
    for number, row in enumerate(grid):
        label = top if number == 0 else bottom if number == HEIGHT - 1 else ""
        picture.append(f"{label:>{margin}} │", style="dim")
        picture.append("".join(row).rstrip() + "\n")
    first, last = units.seconds(min(times)), units.seconds(max(times))
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
