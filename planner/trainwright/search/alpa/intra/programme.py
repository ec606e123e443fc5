"""The integer programme of a graph: one choice at every node, costs of choices and of edges (paper Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Totals:
    """What an assignment costs on each device.

    Attributes:
        seconds: of one micro-batch, forward and backward with communication.
        iteration_seconds: once an iteration.
        state_bytes: weights, gradients, optimizer.
        activation_bytes: of one micro-batch in flight.
    """

    seconds: float
    iteration_seconds: float
    state_bytes: float
    activation_bytes: float

    def objective(self, goal: Goal) -> float:
        """What the programme makes least."""
        return (
            goal.micro_batches * self.seconds
            + self.iteration_seconds
            + goal.seconds_per_byte * (self.state_bytes + goal.in_flight * self.activation_bytes)
        )


@dataclass(frozen=True, slots=True)
class Goal:
    """What is made least: the seconds of an iteration, and memory at a price.

    Attributes:
        micro_batches: of one iteration.
        in_flight: micro-batches whose activations are held at once (Eq. 5's s).
        seconds_per_byte: the price of memory (a Lagrange multiplier); 0: time alone counts.
    """

    micro_batches: int
    in_flight: int = 1
    seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class Choices:
    """What a node costs, [held, algorithm]; inf where a choice is not open.

    Row 0: weights are held as the algorithm uses them; row 1: they are divided over the replicas as well and gathered
    before every use.
    """

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array

    def objective(self, goal: Goal) -> Array:
        """[held, algorithm]."""
        held = self.state_bytes + goal.in_flight * self.activation_bytes
        return goal.micro_batches * self.seconds + self.iteration_seconds + goal.seconds_per_byte * held


@dataclass(frozen=True)
class Edge:
    """[algorithm of source, algorithm of target] seconds for each micro-batch to convert what passes (R of Eq. 1)."""

    source: int
    target: int
    seconds: Array


@dataclass(frozen=True)
class Programme:
    """Nodes and edges; an assignment is a pair (held, algorithm) for each node."""

    nodes: tuple[Choices, ...]
    edges: tuple[Edge, ...]

    def totals(self, assignment: Sequence[tuple[int, int]]) -> Totals:
        """What an assignment costs."""
        nodes = list(zip(self.nodes, assignment, strict=True))
        converting = sum(edge.seconds[assignment[edge.source][1], assignment[edge.target][1]] for edge in self.edges)
        return Totals(
            float(sum(node.seconds[chosen] for node, chosen in nodes) + converting),
            float(sum(node.iteration_seconds[chosen] for node, chosen in nodes)),
            float(sum(node.state_bytes[chosen] for node, chosen in nodes)),
            float(sum(node.activation_bytes[chosen] for node, chosen in nodes)),
        )

    def behind(self, offset: int) -> tuple[Edge, ...]:
        """Its edges, were its nodes numbered from `offset`."""
        return tuple(replace(edge, source=edge.source + offset, target=edge.target + offset) for edge in self.edges)
