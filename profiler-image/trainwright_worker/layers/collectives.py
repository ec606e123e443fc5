"""What the ranks of a tensor group do together, as layers see it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """A tensor group, from one of its ranks. All of them call the same things in the same order.

    Attributes:
        index: this rank's place in the group, and so among stacked parts. It is not always the tensor index: a group's
            ranks are ascending, whatever a plan's placement.
        size: how many ranks there are.
    """

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""

    def all_gather(self, part: Tensor) -> Tensor:
        """Every rank's values (count,), stacked: (size, count)."""

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Of the sum over the ranks of (size, count) this rank's row, (count,)."""
