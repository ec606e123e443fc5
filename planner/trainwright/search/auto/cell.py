"""A kind of tensor group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A kind of tensor group: the devices that compute one replica of a stage together.

    Made once for all that is alike (`Cells.cell`), and told apart by being another: cells are looked up far more often
    than made.

    Attributes:
        accelerators: names of its devices' accelerators, sorted.
        nodes: of its devices, in order; for a group inside one node any such node stands for all alike.
    """

    accelerators: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def tensor(self) -> int:
        return len(self.nodes)
