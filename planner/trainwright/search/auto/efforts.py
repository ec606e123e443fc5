"""How finely the programme looks, by how many devices there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grain:
    """How finely the programme looks: units of a line, cuts between layers, orders of the kinds of nodes."""

    units: int
    cuts: int
    orders: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at.

    Attributes:
        most_tensor: tensor groups reach beyond a node up to so many devices.
        patience: sizes of micro-batches in a row that may be worse before a line is left.
        follows: whether lines after the first are looked at only near the size that was best on the first.
        choices: lines and sizes, the best by a coarse look, that are looked at finely.
        shared_ends: lines with a node whose devices stand at both ends.
        begins_small: whether sizes of micro-batches are looked at from the smallest on, and not from the middle.
    """

    coarse: Grain
    fine: tuple[Grain, ...]
    most_tensor: int
    patience: int
    follows: bool
    choices: int
    shared_ends: int
    begins_small: bool = False


FEW = Effort(Grain(16, 13, 24), (Grain(16, 28, 24),), 8, 100, follows=False, choices=8, shared_ends=24)
MANY = Effort(Grain(12, 13, 6), (Grain(24, 32, 6), Grain(12, 32, 6)), 0, 2, follows=False, choices=3, shared_ends=6)
LARGE = Effort(Grain(12, 13, 2), (Grain(24, 28, 2),), 0, 1, follows=True, choices=3, shared_ends=1)
DEEP = Effort(Grain(32, 24, 4), (Grain(32, 44, 4),), 8, 1, follows=False, choices=2, shared_ends=4, begins_small=True)
PART = Effort(Grain(16, 13, 2), (Grain(16, 28, 2),), 0, 2, follows=True, choices=2, shared_ends=2)
LARGE_PART = Effort(Grain(16, 13, 2), (Grain(24, 28, 2),), 0, 1, follows=True, choices=2, shared_ends=1)
FEW_DEVICES, MANY_DEVICES = 16, 64
"""Up to so many, the first effort, and the second."""
DEEP_STAGES = 6
"""Where the model fills so many devices, the last: memory asks for many stages, and coarse units have no room for them."""
