"""Replicas of a stage on given devices: tensor groups, rows of each, sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainwright.plan import Sharding
from trainwright.runtime import CollectiveRatios


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Class of tensor groups: devices that compute one replica together.

    Cells are interned (`ReplicaTables.cell`) and compared by identity, because lookups dominate.

    Attributes:
        accelerators: sorted, distinct names.
        nodes: node of each device; one node stands for its interchangeable nodes in groups inside a node.
    """

    accelerators: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def tensor(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Rows of one cell class: `larger_cells` cells take `rows + 1`, the others `rows`."""

    rows: int
    larger_cells: int

    @property
    def largest(self) -> int:
        return self.rows + (self.larger_cells > 0)

    def with_added_rows(self, added_rows: int, cell_count: int) -> RowSplit:
        """Spread added rows over `cell_count` cells."""
        return RowSplit(*divmod(self.rows * cell_count + self.larger_cells + added_rows, cell_count))


def balance_rows(
    cell_counts: Mapping[Cell, int], rows: int, seconds: Callable[[Cell, int], float]
) -> dict[Cell, RowSplit] | None:
    """Split rows over cells to minimise the slowest cell's seconds; None if rows are fewer than cells.

    Rows start proportional to speed; the remainder goes to the cell that finishes first. Then the slowest cell gives up
    rows while another finishes one more row sooner.
    """
    cell_count = sum(cell_counts.values())
    if rows < cell_count:
        return None
    if len(cell_counts) == 1:
        (cell,) = cell_counts
        return {cell: RowSplit(*divmod(rows, cell_count))}
    mean = max(rows // cell_count, 1)
    speed = {cell: 1.0 / max(seconds(cell, mean), 1e-30) for cell in cell_counts}
    whole = sum(count * speed[cell] for cell, count in cell_counts.items())
    rows_per_cell = {cell: max(int(rows * speed[cell] / whole), 1) for cell in cell_counts}
    remaining_rows = rows - sum(count * rows_per_cell[cell] for cell, count in cell_counts.items())
    while remaining_rows < 0:
        slowest = max(
            (cell for cell in cell_counts if rows_per_cell[cell] > 1),
            key=lambda cell: seconds(cell, rows_per_cell[cell]),
        )
        rows_per_cell[slowest] -= 1
        remaining_rows += cell_counts[slowest]
    larger_cells = dict.fromkeys(cell_counts, 0)
    while remaining_rows > 0:
        cell = min(cell_counts, key=lambda cell: seconds(cell, rows_per_cell[cell] + 1))
        taken = min(remaining_rows, cell_counts[cell] - larger_cells[cell])
        remaining_rows, larger_cells[cell] = remaining_rows - taken, larger_cells[cell] + taken
        if larger_cells[cell] == cell_counts[cell]:
            rows_per_cell[cell], larger_cells[cell] = rows_per_cell[cell] + 1, 0
    splits = {cell: RowSplit(rows_per_cell[cell], larger_cells[cell]) for cell in cell_counts}
    for _ in range(rows):  # fewer are enough, but where more rows take less time
        slowest = max(cell_counts, key=lambda cell: seconds(cell, splits[cell].largest))
        receiver = min(cell_counts, key=lambda cell: seconds(cell, splits[cell].rows + 1))
        largest = splits[slowest].largest
        if (
            slowest == receiver
            or largest == 1
            or seconds(receiver, splits[receiver].rows + 1) >= seconds(slowest, largest)
        ):
            break
        splits[slowest] = splits[slowest].with_added_rows(-1, cell_counts[slowest])
        splits[receiver] = splits[receiver].with_added_rows(1, cell_counts[receiver])
    return splits


def rows_by_replica(cells: Sequence[Cell], splits: Mapping[Cell, RowSplit]) -> tuple[int, ...]:
    """Return each replica's rows; the first of equal cells take the extra ones."""
    larger_left = {cell: share.larger_cells for cell, share in splits.items()}
    found = []
    for cell in cells:
        found.append(splits[cell].rows + (larger_left[cell] > 0))
        larger_left[cell] -= larger_left[cell] > 0
    return tuple(found)


CellCounts = tuple[tuple[Cell, int], ...]
"""(cell class, count) pairs."""


def sharding_choices(micro_batches: int) -> tuple[Sharding, Sharding, Sharding]:
    """Return the shardings that tables distinguish.

    With several micro-batches ZeRO-1 and ZeRO-2 store the same bytes, and ZeRO-1 reduces after the last backward without delaying
    earlier stages. With one micro-batch ZeRO-2 never stores whole gradients.
    """
    return Sharding.NONE, Sharding.ZERO2 if micro_batches == 1 else Sharding.ZERO1, Sharding.ZERO3


@dataclass(frozen=True, slots=True)
class Rings:
    """Rings over a stage's replicas.

    Attributes:
        intra_node_bandwidth: bytes per second inside a node.
        inter_node_bandwidth: bytes per second of the slowest hop between nodes.
        single_ring_bandwidth: bytes per second of that hop for a single ring.
    """

    node_count: int
    devices_per_node: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    single_ring_bandwidth: float

    def seconds_per_byte(self, tensor: int, devices: int) -> float:
        """Return hierarchical all-reduce seconds per byte of a rank's gradients, all tensor ranks in parallel."""
        if devices == tensor:
            return 0.0
        found = 0.0
        local_replicas = max(self.devices_per_node // tensor, 1)
        if local_replicas > 1:
            found += 2 * (local_replicas - 1) / local_replicas / self.intra_node_bandwidth
        if self.node_count > 1:
            node_ring_size = max(self.node_count * self.devices_per_node // max(tensor, self.devices_per_node), 2)
            found += (
                2
                * (node_ring_size - 1)
                / node_ring_size
                * max(min(tensor, self.devices_per_node) / self.inter_node_bandwidth, 1 / self.single_ring_bandwidth)
            )
        return found


@dataclass(frozen=True, eq=False)
class ReplicaSet:
    """Cells that may compute a stage together, at any row count; interned by `ReplicaTables.replica_set`.

    Attributes:
        ring_seconds: all-reduce seconds per byte of a rank's gradients.
    """

    counts: CellCounts
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
    """Replica set with its rows per micro-batch."""

    replica_set: ReplicaSet
    row_splits: Mapping[Cell, RowSplit]

    @property
    def tensor(self) -> int:
        return self.replica_set.tensor
