"""Replicas of a stage on given devices: tensor groups, rows of each, sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainwright.cost.collectives import ring_bytes_ratio
from trainwright.cost.context import CostContext
from trainwright.cost.time_terms import TensorGroupClass
from trainwright.runtime import CollectiveRatios
from trainwright.strategy import Sharding, Strategy


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Rows of one tensor group class: `larger_groups` groups take `rows + 1`, the others `rows`."""

    rows: int
    larger_groups: int

    @property
    def largest(self) -> int:
        return self.rows + (self.larger_groups > 0)

    def with_added_rows(self, added_rows: int, group_count: int) -> RowSplit:
        """Spread added rows over `group_count` groups."""
        return RowSplit(*divmod(self.rows * group_count + self.larger_groups + added_rows, group_count))


def balance_rows(
    group_counts: Mapping[TensorGroupClass, int], rows: int, seconds: Callable[[TensorGroupClass, int], float]
) -> dict[TensorGroupClass, RowSplit] | None:
    """Split rows over groups to minimise the slowest group's seconds; None if rows are fewer than groups.

    Rows start proportional to speed; the remainder goes to the group that finishes first. Then the slowest group gives up
    rows while another finishes one more row sooner.
    """
    group_count = sum(group_counts.values())
    if rows < group_count:
        return None
    if len(group_counts) == 1:
        (group,) = group_counts
        return {group: RowSplit(*divmod(rows, group_count))}
    mean = max(rows // group_count, 1)
    speed = {group: 1.0 / max(seconds(group, mean), 1e-30) for group in group_counts}
    whole = sum(count * speed[group] for group, count in group_counts.items())
    rows_per_group = {group: max(int(rows * speed[group] / whole), 1) for group in group_counts}
    remaining_rows = rows - sum(count * rows_per_group[group] for group, count in group_counts.items())
    while remaining_rows < 0:
        slowest = max(
            (group for group in group_counts if rows_per_group[group] > 1),
            key=lambda group: seconds(group, rows_per_group[group]),
        )
        rows_per_group[slowest] -= 1
        remaining_rows += group_counts[slowest]
    larger_groups = dict.fromkeys(group_counts, 0)
    while remaining_rows > 0:
        group = min(group_counts, key=lambda group: seconds(group, rows_per_group[group] + 1))
        taken = min(remaining_rows, group_counts[group] - larger_groups[group])
        remaining_rows, larger_groups[group] = remaining_rows - taken, larger_groups[group] + taken
        if larger_groups[group] == group_counts[group]:
            rows_per_group[group], larger_groups[group] = rows_per_group[group] + 1, 0
    splits = {group: RowSplit(rows_per_group[group], larger_groups[group]) for group in group_counts}
    for _ in range(rows):  # fewer are enough, but where more rows take less time
        slowest = max(group_counts, key=lambda group: seconds(group, splits[group].largest))
        receiver = min(group_counts, key=lambda group: seconds(group, splits[group].rows + 1))
        largest = splits[slowest].largest
        if (
            slowest == receiver
            or largest == 1
            or seconds(receiver, splits[receiver].rows + 1) >= seconds(slowest, largest)
        ):
            break
        splits[slowest] = splits[slowest].with_added_rows(-1, group_counts[slowest])
        splits[receiver] = splits[receiver].with_added_rows(1, group_counts[receiver])
    return splits


def rows_by_replica(groups: Sequence[TensorGroupClass], splits: Mapping[TensorGroupClass, RowSplit]) -> tuple[int, ...]:
    """Return each replica's rows; the first of equal groups take the extra ones."""
    larger_left = {group: share.larger_groups for group, share in splits.items()}
    row_counts = []
    for group in groups:
        row_counts.append(splits[group].rows + (larger_left[group] > 0))
        larger_left[group] -= larger_left[group] > 0
    return tuple(row_counts)


GroupCounts = tuple[tuple[TensorGroupClass, int], ...]
"""(tensor group class, count) pairs."""


def sharding_choices(micro_batches: int, context: CostContext) -> tuple[Sharding, ...]:
    """Return the shardings that tables distinguish.

    Where whole gradients are kept over micro-batches, ZeRO-1 and ZeRO-2 store the same bytes, and under ZeRO-1 no layer waits
    for a reduction. With one micro-batch, ZeRO-2 never stores whole gradients. Where it reduces them in each of several, it stores
    less and takes longer.
    """
    if context.keeps_whole_gradients(micro_batches):
        return Sharding.NONE, Sharding.ZERO1, Sharding.ZERO3
    if micro_batches == 1:
        return Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3
    return tuple(Sharding)


@dataclass(frozen=True, slots=True)
class Rings:
    """Rings over a stage's replicas.

    Attributes:
        intra_node_bandwidth: bytes per second inside a node.
        inter_node_bandwidth: bytes per second of the slowest hop between nodes.
        single_ring_bandwidth: bytes per second of that hop for a single stream; each replica on a node sends one.
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
        slowest = 0.0
        local_replicas = max(self.devices_per_node // tensor, 1)
        if local_replicas > 1:
            slowest += ring_bytes_ratio(local_replicas) / self.intra_node_bandwidth
        if self.node_count > 1:
            node_ring_size = max(self.node_count * self.devices_per_node // max(tensor, self.devices_per_node), 2)
            shards = min(tensor, self.devices_per_node)
            slowest += ring_bytes_ratio(node_ring_size) * max(
                shards / self.inter_node_bandwidth, 1 / (local_replicas * self.single_ring_bandwidth)
            )
        return slowest


@dataclass(frozen=True, eq=False)
class ReplicaSet:
    """Tensor groups that may compute a stage together, at any row count; interned by `ReplicaTables.replica_set`.

    Attributes:
        ring_seconds: all-reduce seconds per byte of a rank's gradients.
    """

    counts: GroupCounts
    ring_seconds: float
    ratios: CollectiveRatios

    @cached_property
    def strategy(self) -> Strategy:
        """Degrees of the stage, without sharding and recompute."""
        return Strategy(self.counts[0][0].tensor, sum(count for _, count in self.counts))


@dataclass(frozen=True, slots=True, eq=False)
class StageOption:
    """Replica set with its rows per micro-batch."""

    replica_set: ReplicaSet
    row_splits: Mapping[TensorGroupClass, RowSplit]

    @property
    def strategy(self) -> Strategy:
        """Degrees of the stage, without sharding and recompute."""
        return self.replica_set.strategy
