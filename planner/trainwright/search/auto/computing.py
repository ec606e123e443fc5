"""What computing alone takes, however evenly it is dealt out: communication and memory left aside."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.search.auto.cell import Cell
from trainwright.search.auto.cells import Cells
from trainwright.search.protocol import Problem

_MOST_ROWS = 64
"""At once on a device, for its rows in a second."""


def computing_seconds(problem: Problem, nodes: Sequence[str]) -> float:
    """Of an iteration on these nodes: every device computes whole rows, as many at once as suit it best."""
    cells = Cells(problem, 2)
    rates: dict[str, float] = {}
    together = 0.0
    for name in nodes:
        accelerator = problem.cluster.node(name).accelerator
        if accelerator not in rates:
            rates[accelerator] = _rows_per_second(cells, Cell((accelerator,), (name,)))
        together += rates[accelerator] * problem.cluster.node(name).devices
    return problem.global_batch_size / together


def _rows_per_second(cells: Cells, cell: Cell) -> float:
    most = min(cells.problem.global_batch_size, _MOST_ROWS)
    return max(rows / cells.total_seconds(cell, rows) for rows in (1 << power for power in range(most.bit_length())))
