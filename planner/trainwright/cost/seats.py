"""A stage as the executor sees it: which ranks compute which rows together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from trainwright.cost.collectives import Nodes
from trainwright.plan import LayerRun, Order, Stage

_NODE = attrgetter("node")


@dataclass(frozen=True)
class Seats:
    """The ranks of a stage as one layer run arranges them.

    Attributes:
        nodes: of the stage's devices, in their order.
    """

    nodes: Nodes
    tensor: int
    data: int
    order: Order
    rows: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage, run: LayerRun) -> Seats:
        return cls(tuple(map(_NODE, stage.devices)), run.tensor, run.data, run.order, run.rows)

    @cached_property
    def replicas(self) -> tuple[Nodes, ...]:
        """By data replica: the tensor group's nodes."""
        if self.order is Order.TENSOR_INNER:
            return tuple(self.nodes[i : i + self.tensor] for i in range(0, len(self.nodes), self.tensor))
        return tuple(self.nodes[i :: self.data] for i in range(self.data))

    @cached_property
    def rows_and_nodes(self) -> tuple[tuple[int, Nodes], ...]:
        """By data replica: its rows, and its tensor group's nodes."""
        return tuple(zip(self.rows, self.replicas, strict=True))

    @cached_property
    def data_groups(self) -> tuple[Nodes, ...]:
        """By tensor index: the nodes of the ranks that hold the same part of the weights."""
        return tuple(zip(*self.replicas, strict=True))

    @cached_property
    def rows_by_device(self) -> tuple[int, ...]:
        """By device of the stage: its rows of a micro-batch."""
        if self.order is Order.TENSOR_INNER:
            return tuple(rows for rows in self.rows for _ in range(self.tensor))
        return self.rows * self.tensor

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """By data replica: the row of a micro-batch behind its last."""
        return tuple(accumulate(self.rows))

    def place(self, index: int) -> tuple[int, int]:
        """Data replica and tensor index of the stage's index-th device."""
        if self.order is Order.TENSOR_INNER:
            return divmod(index, self.tensor)
        tensor, replica = divmod(index, self.data)
        return replica, tensor

    def is_arranged_as(self, other: Seats) -> bool:
        """Whether the same ranks compute the same rows with the same parts of the weights."""
        mine = (self.tensor, self.rows, self.order if self.tensor > 1 and self.data > 1 else None)
        return mine == (other.tensor, other.rows, other.order if other.tensor > 1 and other.data > 1 else None)


def overlaps(senders: Seats, receivers: Seats) -> Iterator[tuple[int, int, int]]:
    """Who sends how many rows of a micro-batch to whom, by data replicas: the overlaps of their row intervals."""
    sender = receiver = row = 0
    while sender < senders.data and receiver < receivers.data:
        end = min(senders.ends[sender], receivers.ends[receiver])
        yield sender, receiver, end - row
        row = end
        sender, receiver = sender + (senders.ends[sender] == end), receiver + (receivers.ends[receiver] == end)
