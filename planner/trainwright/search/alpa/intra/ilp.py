"""Solution of an operator graph's integer program (paper Eq. 1) by HiGHS under a memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.cost.operators.integer_program import AssignmentCost, IntegerProgram, WeightedObjective

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IlpSolution:
    """Best assignment, (weight mode, algorithm) per node, and its cost."""

    assignment: tuple[tuple[int, int], ...]
    totals: AssignmentCost


def solve_ilp(
    programme: IntegerProgram, goal: WeightedObjective, *, memory_bytes: float = np.inf, limit_seconds: float = 60.0
) -> IlpSolution | None:
    """Return the assignment of least objective within the memory limit, None if there is none.

    Eq. 1 gets one binary s per choice of a node and one variable e in 0 … 1 per pair of algorithms of an edge. An
    edge's variables sum to its ends' choices, row by row and column by column, which linearises their product as
    tightly as possible. Memory, state + in_flight × activations, is one more constraint (ours).

    Raises:
        ValueError: The solver does not finish within `limit_seconds`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - slow to import

    rows = _MilpModel(programme, goal)
    constraints = [LinearConstraint(rows.equality_matrix(), rows.right_hand_side, rows.right_hand_side)]
    if np.isfinite(memory_bytes):
        constraints.append(LinearConstraint(rows.memory[None] / memory_bytes, -np.inf, 1.0))
    scale = max(float(np.abs(rows.costs[rows.is_allowed]).max(initial=0.0)), 1e-300)
    solution = milp(
        np.where(rows.is_allowed, rows.costs, 0.0) / scale,
        integrality=rows.integral,
        bounds=Bounds(0.0, rows.is_allowed.astype(np.float64)),
        constraints=constraints,
        options={"time_limit": limit_seconds, "mip_rel_gap": 0.0},
    )
    if solution.status == 2:  # HiGHS: infeasible
        return None
    if solution.x is None or solution.status != 0:
        raise ValueError(f"the integer program was not solved within {limit_seconds} s: {solution.message}")
    assignment = rows.assignment(solution.x)
    totals = programme.assignment_cost(assignment)
    return IlpSolution(assignment, totals)


class _MilpModel:
    """Variables of the solver: each node's choices, `[weight mode, algorithm]` flattened, then each edge's pairs."""

    def __init__(self, programme: IntegerProgram, goal: WeightedObjective) -> None:
        self.programme = programme
        batches = goal.micro_batches
        nodes = [node.objective(goal).ravel() for node in programme.nodes]
        resident_bytes = [
            (node.state_bytes + goal.in_flight * node.activation_bytes).ravel() for node in programme.nodes
        ]
        edges = [batches * edge.seconds.ravel() for edge in programme.edges]
        self.node_at = np.concatenate([[0], np.cumsum([len(costs) for costs in nodes])]).astype(int)
        self.edge_at = self.node_at[-1] + np.concatenate([[0], np.cumsum([len(costs) for costs in edges])]).astype(int)
        self.costs: Array = np.concatenate([*nodes, *edges])
        self.is_allowed = np.isfinite(self.costs)
        sizes: Array = np.concatenate([*resident_bytes, *(np.zeros(len(costs)) for costs in edges)])
        self.memory: Array = np.where(self.is_allowed, sizes, 0.0)
        self.integral = np.concatenate([np.ones(self.node_at[-1]), np.zeros(len(self.costs) - self.node_at[-1])])
        pairs = [edge.seconds.shape for edge in programme.edges]
        self.right_hand_side: Array = np.concatenate(
            [np.ones(len(nodes)), np.zeros(sum(first + second for first, second in pairs))]
        )

    def equality_matrix(self) -> Any:
        """Build the sparse constraints: one choice per node; an edge's pairs sum to the choices of its ends."""
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
        """Return (weight mode, algorithm) of every node."""
        choices: list[tuple[int, int]] = []
        for number, node in enumerate(self.programme.nodes):
            best = int(solved[self.node_at[number] : self.node_at[number + 1]].argmax())
            mode, algorithm = divmod(best, node.seconds.shape[1])
            choices.append((mode, algorithm))
        return tuple(choices)
