"""Costs of the choices of an operator graph, as the nodes and edges of an integer program (paper Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainwright.cost.layer_sums import Array


@dataclass(frozen=True, slots=True)
class AssignmentCost:
    """Cost of an assignment on each device.

    Attributes:
        seconds: forward and backward of one micro-batch with communication.
        iteration_seconds: gradient reduction and optimizer step.
        state_bytes: weights, gradients, optimizer state.
        activation_bytes: one micro-batch in flight.
    """

    seconds: float
    iteration_seconds: float
    state_bytes: float
    activation_bytes: float

    def objective(self, goal: WeightedObjective) -> float:
        """Return the weighted objective."""
        return (
            goal.micro_batches * self.seconds
            + self.iteration_seconds
            + goal.memory_price * (self.state_bytes + goal.in_flight * self.activation_bytes)
        )


@dataclass(frozen=True, slots=True)
class WeightedObjective:
    """Objective to minimise: seconds of an iteration plus memory times its price.

    Attributes:
        micro_batches: per iteration.
        in_flight: micro-batches whose activations are in memory at once (Eq. 5's s).
        memory_price: Lagrange multiplier of memory, in seconds per byte; 0 minimises time alone.
    """

    micro_batches: int
    in_flight: int = 1
    memory_price: float = 0.0


@dataclass(frozen=True)
class NodeChoices:
    """Costs of a node's choices, `[weight mode, algorithm]`; inf where a choice is not allowed.

    In weight mode 0, weights are stored as the algorithm uses them; in mode 1 they are also sharded over the replicas
    and gathered before each use.
    """

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array

    def objective(self, goal: WeightedObjective) -> Array:
        """Return the weighted objective, `[weight mode, algorithm]`."""
        resident_bytes = self.state_bytes + goal.in_flight * self.activation_bytes
        return goal.micro_batches * self.seconds + self.iteration_seconds + goal.memory_price * resident_bytes


@dataclass(frozen=True)
class EdgeCosts:
    """Resharding seconds per micro-batch between two nodes, `[source algorithm, target algorithm]` (R of Eq. 1)."""

    source: int
    target: int
    seconds: Array


@dataclass(frozen=True)
class IntegerProgram:
    """Nodes and edges of a program; an assignment is a pair (weight mode, algorithm) per node."""

    nodes: tuple[NodeChoices, ...]
    edges: tuple[EdgeCosts, ...]

    def assignment_cost(self, assignment: Sequence[tuple[int, int]]) -> AssignmentCost:
        nodes = list(zip(self.nodes, assignment, strict=True))
        converting = sum(edge.seconds[assignment[edge.source][1], assignment[edge.target][1]] for edge in self.edges)
        return AssignmentCost(
            float(sum(node.seconds[chosen] for node, chosen in nodes) + converting),
            float(sum(node.iteration_seconds[chosen] for node, chosen in nodes)),
            float(sum(node.state_bytes[chosen] for node, chosen in nodes)),
            float(sum(node.activation_bytes[chosen] for node, chosen in nodes)),
        )

    def offset_edges(self, offset: int) -> tuple[EdgeCosts, ...]:
        """Return the edges renumbered for nodes that start at `offset`."""
        return tuple(replace(edge, source=edge.source + offset, target=edge.target + offset) for edge in self.edges)
