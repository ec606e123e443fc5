"""Rank layout: which ranks of a stage form tensor and data groups, and which rows each data replica computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from trainwright.cost.collectives import Nodes
from trainwright.plan import LayerRun, RankOrder, Stage

_NODE = attrgetter("node")


@dataclass(frozen=True)
class RankLayout:
    """Rank layout of one layer run of a stage.

    Attributes:
        nodes: node of each device of the stage, in device order.
        rows: rows of a micro-batch that each data replica computes.
    """

    nodes: Nodes
    tensor: int
    data: int
    order: RankOrder
    rows: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage, run: LayerRun) -> RankLayout:
        return cls(tuple(map(_NODE, stage.devices)), run.tensor, run.data, run.order, run.rows)

    @cached_property
    def tensor_group_nodes(self) -> tuple[Nodes, ...]:
        """`[replica]` nodes of the tensor group."""
        if self.order is RankOrder.TENSOR_INNER:
            return tuple(self.nodes[i : i + self.tensor] for i in range(0, len(self.nodes), self.tensor))
        return tuple(self.nodes[i :: self.data] for i in range(self.data))

    @cached_property
    def rows_and_tensor_group_nodes(self) -> tuple[tuple[int, Nodes], ...]:
        """`[replica]` rows, and nodes of the tensor group."""
        return tuple(zip(self.rows, self.tensor_group_nodes, strict=True))

    @cached_property
    def data_group_nodes(self) -> tuple[Nodes, ...]:
        """`[tensor rank]` nodes of the ranks that have the same shard of the weights."""
        return tuple(zip(*self.tensor_group_nodes, strict=True))

    @cached_property
    def rows_by_device(self) -> tuple[int, ...]:
        """`[device]` rows of a micro-batch."""
        if self.order is RankOrder.TENSOR_INNER:
            return tuple(rows for rows in self.rows for _ in range(self.tensor))
        return self.rows * self.tensor

    @cached_property
    def row_ends(self) -> tuple[int, ...]:
        """`[replica]` index after the replica's last row of a micro-batch."""
        return tuple(accumulate(self.rows))

    def replica_and_tensor_rank(self, index: int) -> tuple[int, int]:
        """Return the data replica and the tensor rank of the stage's index-th device."""
        if self.order is RankOrder.TENSOR_INNER:
            return divmod(index, self.tensor)
        tensor, replica = divmod(index, self.data)
        return replica, tensor

    def has_same_layout_as(self, other: RankLayout) -> bool:
        """Return whether the same ranks compute the same rows with the same shards of the weights."""
        mine = (self.tensor, self.rows, self.order if self.tensor > 1 and self.data > 1 else None)
        return mine == (other.tensor, other.rows, other.order if other.tensor > 1 and other.data > 1 else None)


def row_overlaps(senders: RankLayout, receivers: RankLayout) -> Iterator[tuple[int, int, int]]:
    """Yield (sending replica, receiving replica, rows) for each overlap of their row intervals."""
    sender = receiver = row = 0
    while sender < senders.data and receiver < receivers.data:
        end = min(senders.row_ends[sender], receivers.row_ends[receiver])
        yield sender, receiver, end - row
        row = end
        sender, receiver = sender + (senders.row_ends[sender] == end), receiver + (receivers.row_ends[receiver] == end)
