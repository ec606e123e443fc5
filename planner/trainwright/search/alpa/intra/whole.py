"""The integer programme of a whole run of layers, as the paper solves it: for a last word under a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.search.alpa.intra.integer import solve
from trainwright.search.alpa.intra.pricing import LayerPricing
from trainwright.search.alpa.intra.programme import Choices, Edge, Goal, Programme, Totals


@dataclass(frozen=True)
class WholeRun:
    """Consecutive layers joined into one programme.

    Attributes:
        starts: the number of every layer's first node.
    """

    programme: Programme
    starts: tuple[int, ...]

    @classmethod
    def of(cls, pricings: Sequence[LayerPricing]) -> WholeRun:
        """What leaves a layer enters the next: its node there has to name the same layout."""
        nodes: list[Choices] = []
        edges: list[Edge] = []
        starts: list[int] = []
        before: LayerPricing | None = None
        for pricing in pricings:
            programme, start = pricing.programme(), len(nodes)
            edges += programme.behind(start)
            if before is not None:
                graph = before.algorithms.graph
                for position, source in enumerate(graph.wired.outputs[: pricing.algorithms.graph.wired.inputs]):
                    left = before.algorithms.output(source)
                    taken = pricing.algorithms.inputs[position]
                    differs = np.where(left[:, None] == taken[None, :], 0.0, np.inf)
                    edges.append(Edge(starts[-1] + graph.node_of[source], start + position, differs))
            nodes += programme.nodes
            starts.append(start)
            before = pricing
        return cls(Programme(tuple(nodes), tuple(edges)), tuple(starts))

    def solved(
        self, goal: Goal, memory_bytes: float = np.inf, limit_seconds: float = 60.0
    ) -> tuple[tuple[tuple[tuple[int, int], ...], ...], Totals] | None:
        """(held, algorithm) of every layer's nodes, and what they cost; None where the memory never suffices."""
        found = solve(self.programme, goal, memory_bytes=memory_bytes, limit_seconds=limit_seconds)
        if found is None:
            return None
        ends = (*self.starts[1:], len(found.assignment))
        layers = tuple(found.assignment[start:end] for start, end in zip(self.starts, ends, strict=True))
        return layers, found.totals
