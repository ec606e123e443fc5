"""A kind of tensor group."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of tensor group: the devices that compute one replica of a stage together.

    Attributes:
        accelerators: names of its devices' accelerators, sorted.
        nodes: of its devices, in order; for a group inside one node any such node stands for all alike.
    """

    accelerators: tuple[str, ...]
    nodes: tuple[str, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.accelerators, self.nodes)))

    def __hash__(self) -> int:
        """Kept: cells are looked up far more often than made."""
        return self._hash

    @property
    def tensor(self) -> int:
        return len(self.nodes)
