"""What computing alone takes, however evenly it is dealt out, and what is hard to avoid beside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.cost.links import links_of
from trainwright.search.auto.cell import Cell
from trainwright.search.auto.cells import Cells
from trainwright.search.protocol import Problem

_MOST_ROWS = 64
"""At once on a device, for its rows in a second."""


@dataclass
class Computing:
    """Of one problem's batch, every device busy all the time: a loose measure, above all where rows are few."""

    problem: Problem

    def seconds(self, nodes: Iterable[str], most_devices: int | None = None) -> float:
        """Of an iteration on these nodes, or so many devices of each; 0 where profiles say that it takes no time."""
        used = [self.problem.cluster.node(name) for name in nodes]
        devices = [min(node.devices, most_devices or node.devices) for node in used]
        rates = (self._rates[node.accelerator] * count for node, count in zip(used, devices, strict=True))
        return self.problem.global_batch_size / sum(rates)

    @cached_property
    def all_seconds(self) -> float:
        """Of an iteration on all nodes."""
        return self.seconds(self.problem.nodes)

    @cached_property
    def _rates(self) -> dict[str, float]:
        """By accelerator: rows of the whole model in a second on one device, as many at once as suit it best."""
        problem, cells = self.problem, Cells(self.problem, 2)
        nodes = {problem.cluster.node(name).accelerator: name for name in problem.nodes}
        return {name: max(_rates(problem, cells, cells.cell((node,)))) for name, node in nodes.items()}


def _rates(problem: Problem, cells: Cells, cell: Cell) -> Iterable[float]:
    """At every profiled number of rows: beyond them times are drawn out, and may fall to nothing."""
    profiled = {layer.rows for layer in problem.profiles.layers if layer.accelerator in cell.accelerators}
    for rows in {1, *(one for one in profiled if one <= min(problem.global_batch_size, _MOST_ROWS))}:
        seconds = cells.total_seconds(cell, rows)
        yield rows / seconds if seconds > 0 else np.inf


def sharing_seconds(problem: Problem) -> float:
    """What summing weights that layers share takes on the best link between nodes; 0 where there is one node alone."""
    kinds = [kind for kind in problem.model.kinds if kind.shared_weight is not None]
    bandwidth, numbers = links_of(problem.cluster).bandwidth, problem.node_numbers
    between = bandwidth[np.ix_(numbers, numbers)][~np.eye(len(numbers), dtype=np.bool_)]
    if not kinds or not between.size:
        return 0.0
    size = max(kind.shared_parameters for kind in kinds) * problem.setting.gradient_dtype.num_bytes
    return size / float(between.max())
