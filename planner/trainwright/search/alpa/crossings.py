"""What a micro-batch takes over the boundary between two stages, there and back: our addition to Eq. 2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwright.search.alpa.edges import Edges, Indices
from trainwright.search.alpa.layer_spans import LayerSpans
from trainwright.search.alpa.submesh import Block, Line
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array


@dataclass(frozen=True, eq=False)
class Crossings:
    """Boundaries of a line of devices, by where they lie.

    The paper leaves messages out of Eq. 2, as its networks are fast. They lengthen the way of a micro-batch through the
    pipeline, and so count in the sum; and as messages of one boundary and direction leave one after the other, a
    pipeline goes no faster than its slowest boundary: that counts as the longest stage does.

    Attributes:
        message_bytes: [boundary] of one micro-batch; 0 at both ends of the model.
        paces: [direction, devices before] seconds per byte, forward and back.
        latencies: [direction, devices before] seconds.
    """

    message_bytes: Array
    paces: Array
    latencies: Array

    def seconds(self, edges: Edges, chosen: Indices, before: Indices) -> tuple[Array, Array]:
        """Of these stages, so many devices before each: of the messages that come in from both sides, and the longer.

        Every tensor rank of a stage reads all rows, forward from the stage before and back from the one behind.
        """
        copies, behind = edges.copies[chosen], before + edges.size[chosen]
        there = self.message_bytes[edges.first[chosen]] * copies * self.paces[0, before]
        back = self.message_bytes[edges.end[chosen]] * copies * self.paces[1, behind]
        return there + back + self.latencies[0, before] + self.latencies[1, behind], np.maximum(there, back)

    def distinct(self, edges: Edges) -> Array:
        """Seconds that messages into these stages may take, wherever the stages lie."""
        there = np.unique(self.message_bytes[edges.first] * edges.copies)
        back = np.unique(self.message_bytes[edges.end] * edges.copies)
        found = [
            np.multiply.outer(sizes, np.unique(pace)) for sizes, pace in zip((there, back), self.paces, strict=True)
        ]
        return np.unique(np.concatenate([values.ravel() for values in found]))


def no_crossings(clusters: int, devices: int) -> Crossings:
    """Eq. 2 as the paper has it."""
    return Crossings(np.zeros(clusters + 1), np.zeros((2, devices + 1)), np.zeros((2, devices + 1)))


def crossings_of(problem: Problem, spans: LayerSpans, line: Line, rows: int) -> Crossings:
    """Between nodes of a block, between blocks and inside nodes, on the links that neighbours have."""
    model = problem.model
    sent = [0, *(rows * model.output_bytes_per_row(layer) for layer in range(len(model.layers) - 1)), 0]
    paces, latencies = np.zeros((2, line.size + 1)), np.zeros((2, line.size + 1))

    def lay(places: slice | int, source: str, target: str) -> None:
        for direction, edge in enumerate(((source, target), (target, source))):
            latencies[direction, places], bandwidth = problem.setting.fabric.link(edge)
            paces[direction, places] = 1 / bandwidth

    last: Block | None = None
    for block, start in zip(line.blocks, line.starts, strict=False):
        end = start + block.size
        if block.width > 1:
            lay(slice(start + 1, end), block.nodes[0], block.nodes[0])
        if len(block.nodes) > 1:
            lay(slice(start + block.width, end, block.width), block.nodes[0], block.nodes[1])
        if last is not None:
            lay(start, last.nodes[-1], block.nodes[0])
        last = block
    return Crossings(np.array(sent, dtype=float)[spans.bounds], paces, latencies)
