"""What computing alone takes, however evenly it is dealt out, and what is hard to avoid beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainwright.cost.links import links_of
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


def sharing_seconds(problem: Problem) -> float:
    """What summing weights that layers share takes on the best link between nodes; 0 where there is one node alone."""
    kinds = [kind for kind in problem.model.kinds if kind.shared_weight is not None]
    bandwidth, used = links_of(problem.cluster).bandwidth, set(problem.nodes)
    numbers = [number for number, node in enumerate(problem.cluster.nodes) if node.name in used]
    between = bandwidth[np.ix_(numbers, numbers)][~np.eye(len(numbers), dtype=np.bool_)]
    if not kinds or not between.size:
        return 0.0
    size = max(kind.shared_parameters for kind in kinds) * problem.setting.gradient_dtype.num_bytes
    return size / float(between.max())


def _rows_per_second(cells: Cells, cell: Cell) -> float:
    most = min(cells.problem.global_batch_size, _MOST_ROWS)
    return max(rows / cells.total_seconds(cell, rows) for rows in (1 << power for power in range(most.bit_length())))
