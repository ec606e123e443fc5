"""An operator as a loop nest over named dimensions, from which its parallel algorithms and their communication follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainwright.search.alpa.intra.layouts import Axis


class Loop(StrEnum):
    """Dimensions that operators loop over."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    HEADS = "heads"
    IN = "in"
    OUT = "out"
    WIDTH = "width"
    ENTRIES = "entries"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Tensor:
    """What an operator reads, holds or writes.

    Attributes:
        axes: the loops that index it, each with the axis of the tensor that it is. Any other loop, divided over
            devices, leaves partial sums there: of the tensor where it is written, of its gradient where it is read.
        elements: values for each row; of a weight, values in all.
    """

    axes: tuple[tuple[Loop, Axis], ...]
    elements: float

    def axis(self, loop: Loop | None) -> Axis:
        """The axis that a loop is; NOTHING where it does not index the tensor."""
        return next((axis for name, axis in self.axes if name is loop), Axis.NOTHING)

    def loop(self, axis: Axis) -> Loop | None:
        """The loop that an axis is."""
        return next((name for name, own in self.axes if own is axis), None)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of a layer.

    Attributes:
        loops: those that may be divided, each with its size. The batch's is the micro-batch's rows, written 0 here.
        output: what it writes.
        operands: what it reads of other operators, in order.
        weight: what it holds, or None.
        summed: small sums of its own (a normalisation's moments) with the loops over which they go, or None: devices
            that divide such a loop sum them, forward and backward.
        heavy: whether its computation is never replicated (paper §4.2).
        trivial: whether it takes an operand's layout in place of choosing its own (paper §4.2).
        split: the loops that a tensor degree of the plan document divides; none: every rank of it computes all.
        flops_per_row, moved_per_row: forward; values read and written.
        saved_elements_per_row, saved_bytes_per_row: kept for the backward, divided as what it reads first is.
    """

    name: str
    loops: tuple[tuple[Loop, int], ...]
    output: Tensor
    operands: tuple[Tensor, ...] = ()
    weight: Tensor | None = None
    summed: tuple[Tensor, tuple[Loop, ...]] | None = None
    heavy: bool = False
    trivial: bool = False
    split: tuple[Loop, ...] = ()
    flops_per_row: float = 0.0
    moved_per_row: float = 0.0
    saved_elements_per_row: float = 0.0
    saved_bytes_per_row: float = 0.0

    def size(self, loop: Loop, rows: int) -> int:
        """Into how many parts a loop can be divided at most."""
        return rows if loop is Loop.BATCH else dict(self.loops)[loop]
