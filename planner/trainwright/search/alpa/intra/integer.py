"""The integer programme solved as such, by HiGHS: with a limit of memory, which the paper checks only afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.intra.programme import Goal, Programme, Totals

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best assignment, (held, algorithm) by node, and what it costs."""

    assignment: tuple[tuple[int, int], ...]
    totals: Totals


def solve(
    programme: Programme, goal: Goal, *, memory_bytes: float = np.inf, limit_seconds: float = 60.0
) -> Optimum | None:
    """The assignment with the least objective that holds no more memory than that; None where there is none.

    One binary s for every choice of a node and one variable e in 0 … 1 for every pair of algorithms of an edge (paper
    Eq. 1). An edge's variables sum to its ends' choices, row by row and column by column, which linearises their product
    and is as tight as can be. Memory, state + in_flight × activations, is one more row (ours).

    Raises ValueError where the solver ends without an answer within `limit_seconds`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - slow to import

    rows = _Rows(programme, goal)
    constraints = [LinearConstraint(rows.equalities(), rows.right, rows.right)]
    if np.isfinite(memory_bytes):
        constraints.append(LinearConstraint(rows.memory[None] / memory_bytes, -np.inf, 1.0))
    scale = max(float(np.abs(rows.costs[rows.open]).max(initial=0.0)), 1e-300)
    found = milp(
        np.where(rows.open, rows.costs, 0.0) / scale,
        integrality=rows.integral,
        bounds=Bounds(0.0, rows.open.astype(np.float64)),
        constraints=constraints,
        options={"time_limit": limit_seconds, "mip_rel_gap": 0.0},
    )
    if found.status == 2:  # HiGHS: infeasible
        return None
    if found.x is None or found.status != 0:
        raise ValueError(f"the integer programme was not solved within {limit_seconds} s: {found.message}")
    assignment = rows.assignment(found.x)
    totals = programme.totals(assignment)
    return Optimum(assignment, totals)


class _Rows:
    """Variables: the choices of every node, [held, algorithm] flattened, then the pairs of every edge."""

    def __init__(self, programme: Programme, goal: Goal) -> None:
        self.programme = programme
        batches = goal.micro_batches
        nodes = [node.objective(goal).ravel() for node in programme.nodes]
        held = [(node.state_bytes + goal.in_flight * node.activation_bytes).ravel() for node in programme.nodes]
        edges = [batches * edge.seconds.ravel() for edge in programme.edges]
        self.node_at = np.concatenate([[0], np.cumsum([len(costs) for costs in nodes])]).astype(int)
        self.edge_at = self.node_at[-1] + np.concatenate([[0], np.cumsum([len(costs) for costs in edges])]).astype(int)
        self.costs: Array = np.concatenate([*nodes, *edges])
        self.open = np.isfinite(self.costs)
        sizes: Array = np.concatenate([*held, *(np.zeros(len(costs)) for costs in edges)])
        self.memory: Array = np.where(self.open, sizes, 0.0)
        self.integral = np.concatenate([np.ones(self.node_at[-1]), np.zeros(len(self.costs) - self.node_at[-1])])
        pairs = [edge.seconds.shape for edge in programme.edges]
        self.right: Array = np.concatenate(
            [np.ones(len(nodes)), np.zeros(sum(first + second for first, second in pairs))]
        )

    def equalities(self) -> Any:
        """Sparse: one choice a node; an edge's pairs sum to the choices of its ends."""
        from scipy.sparse import coo_array  # noqa: PLC0415 - slow to import

        entries: list[tuple[int, int, float]] = []
        for number in range(len(self.programme.nodes)):
            entries += [(number, column, 1.0) for column in range(self.node_at[number], self.node_at[number + 1])]
        row = len(self.programme.nodes)
        for number, edge in enumerate(self.programme.edges):
            first, second = edge.seconds.shape
            pairs = np.arange(self.edge_at[number], self.edge_at[number + 1]).reshape(first, second)
            for end, members in ((edge.source, pairs), (edge.target, pairs.T)):
                count = len(members)
                for algorithm, columns in enumerate(members):
                    entries += [(row, int(column), 1.0) for column in columns]
                    choices = range(self.node_at[end] + algorithm, self.node_at[end + 1], count)
                    entries += [(row, column, -1.0) for column in choices]
                    row += 1
        at = [[entry[0] for entry in entries], [entry[1] for entry in entries]]
        return coo_array(([entry[2] for entry in entries], at), shape=(row, len(self.costs))).tocsc()

    def assignment(self, solved: Array) -> tuple[tuple[int, int], ...]:
        """(held, algorithm) of every node."""
        found: list[tuple[int, int]] = []
        for number, node in enumerate(self.programme.nodes):
            best = int(solved[self.node_at[number] : self.node_at[number + 1]].argmax())
            held, algorithm = divmod(best, node.seconds.shape[1])
            found.append((held, algorithm))
        return tuple(found)
