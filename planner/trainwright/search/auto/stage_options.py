"""How a stage may be set up on given devices: its tensor degree, who computes how many rows, what is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from trainwright.plan import Sharding
from trainwright.runtime import CollectiveRatios
from trainwright.search.auto.cell import Cell
from trainwright.search.auto.rows import Share

Counted = tuple[tuple[Cell, int], ...]
"""Kinds of cells, and how many there are of each."""


def means_of(micro_batches: int) -> tuple[Sharding, Sharding, Sharding]:
    """What tables tell apart of sharding.

    With several micro-batches zero1 and zero2 hold the same, and zero1's sums, behind the last backward, keep no stage
    before from its own. With one alone zero2 never holds whole gradients.
    """
    return Sharding.NONE, Sharding.ZERO2 if micro_batches == 1 else Sharding.ZERO1, Sharding.ZERO3


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings over a stage's replicas.

    Attributes:
        nodes: how many nodes the stage spans.
        members: its devices on one node.
        inside, between: bytes per second inside a node, and of the slowest step from node to node.
        flow: of that step where a single ring takes it.
    """

    nodes: int
    members: int
    inside: float
    between: float
    flow: float

    def seconds_per_byte(self, tensor: int, devices: int) -> float:
        """Of an all-reduce of the gradients on one rank, by hierarchical rings; all tensor parts at once."""
        if devices == tensor:
            return 0.0
        found = 0.0
        local = max(self.members // tensor, 1)
        if local > 1:
            found += 2 * (local - 1) / local / self.inside
        if self.nodes > 1:
            across = max(self.nodes * self.members // max(tensor, self.members), 2)
            found += 2 * (across - 1) / across * max(min(tensor, self.members) / self.between, 1 / self.flow)
        return found


@dataclass(frozen=True, eq=False)
class Team:
    """Cells that may compute a stage together, whatever its rows: made once for all that is alike (`Cells.team`).

    Attributes:
        counts: how many there are of each kind.
        ring_seconds: of an all-reduce by an undisturbed ring for every byte of a rank's gradients.
        ratios: of its collectives over such rings.
    """

    counts: Counted
    ring_seconds: float
    ratios: CollectiveRatios

    @cached_property
    def tensor(self) -> int:
        return self.counts[0][0].tensor

    @cached_property
    def data(self) -> int:
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True, eq=False)
class StageOption:
    """A stage on a team's cells.

    Attributes:
        shared: rows of a micro-batch for each kind of cell.
    """

    team: Team
    shared: Mapping[Cell, Share]

    @property
    def tensor(self) -> int:
        return self.team.tensor
