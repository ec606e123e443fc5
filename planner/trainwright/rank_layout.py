"""Rank layout: which members of a stage form tensor and data groups, and which rows of a micro-batch each computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import Generic, NamedTuple, TypeVar

from trainwright.model import Model
from trainwright.plan import LayerRun, Stage
from trainwright.strategy import RankOrder, Sharding, Strategy

T = TypeVar("T", bound=Hashable)
Interval = tuple[int, int]
"""Start and stop."""
ShardIndex = tuple[int, int]
"""(index, number of equal shards); (0, 1) is unsharded."""
WHOLE: ShardIndex = (0, 1)


class Position(NamedTuple):
    """Data replica of a member, and its rank in the tensor group."""

    replica: int
    tensor_rank: int


class StateShard(NamedTuple):
    """Shard of a layer's state that is resident on one member.

    Attributes:
        tensor: shard of the parameters that the tensor group splits.
        weights: further shard of the weights among data replicas.
        optimizer: further shard of the optimizer state among data replicas.
    """

    tensor: ShardIndex
    weights: ShardIndex
    optimizer: ShardIndex


@dataclass(frozen=True)
class RankLayout(Generic[T]):
    """Members of a stage as one layer run arranges them: the tensor group of replica r computes `rows[r]` rows.

    Members are devices, their nodes or their ranks. Methods that look up a member need distinct ones.

    Attributes:
        members: in the order of the stage's devices.
        arrangement: degrees and order of the run's strategy; layouts with other savings are equal.
    """

    members: tuple[T, ...]
    arrangement: Strategy
    rows: tuple[int, ...]

    @classmethod
    def of(cls, members: tuple[T, ...], run: LayerRun) -> RankLayout[T]:
        return RankLayout(members, run.strategy.arrangement, run.rows)

    @cached_property
    def by_index(self) -> RankLayout[int]:
        """Same layout, with the members' indexes as members."""
        return RankLayout(tuple(range(len(self.members))), self.arrangement, self.rows)

    @cached_property
    def tensor_groups(self) -> tuple[tuple[T, ...], ...]:
        """`[replica][tensor rank]` members."""
        return self.arrangement.tensor_groups(self.members)

    @cached_property
    def data_groups(self) -> tuple[tuple[T, ...], ...]:
        """`[tensor rank][replica]` members: those with the same shard of the weights."""
        return tuple(zip(*self.tensor_groups, strict=True))

    def position(self, index: int) -> Position:
        """Return the position of the index-th member."""
        if self.arrangement.order is RankOrder.TENSOR_INNER:
            return Position(*divmod(index, self.arrangement.tensor))
        tensor_rank, replica = divmod(index, self.replicas)
        return Position(replica, tensor_rank)

    @cached_property
    def _positions(self) -> dict[T, Position]:
        return {member: self.position(index) for index, member in enumerate(self.members)}

    def position_of(self, member: T) -> Position:
        """Return the position of a member. Raises KeyError if the stage does not have it."""
        return self._positions[member]

    @property
    def replicas(self) -> int:
        """Number of data replicas."""
        return len(self.rows)

    def tensor_shard(self, member: T) -> ShardIndex:
        """Return the shard of the weights that a member has as a rank of its tensor group."""
        return self.position_of(member).tensor_rank, self.arrangement.tensor

    @cached_property
    def row_intervals(self) -> tuple[Interval, ...]:
        """`[replica]` rows of a micro-batch."""
        return tuple(pairwise(accumulate(self.rows, initial=0)))

    def row_interval_of(self, member: T) -> Interval:
        """Return the rows of a micro-batch that a member computes."""
        return self.row_intervals[self.position_of(member).replica]

    @cached_property
    def rows_by_member(self) -> tuple[int, ...]:
        """`[member]` number of rows of a micro-batch."""
        return self.arrangement.order.members((rows,) * self.arrangement.tensor for rows in self.rows)

    def shard(self, index: int, sharding: Sharding) -> StateShard:
        """Return the state of each layer that is resident on the index-th member."""
        replica, tensor_rank = self.position(index)
        among_replicas = WHOLE if sharding is Sharding.NONE else (replica, self.replicas)
        weights = among_replicas if sharding is Sharding.ZERO3 else WHOLE
        return StateShard((tensor_rank, self.arrangement.tensor), weights, among_replicas)

    @property
    def tensor_division(self) -> tuple[int, RankOrder | None]:
        """Key that is equal for layouts of a stage in which every member has the same tensor rank."""
        tensor, data = self.arrangement.degrees
        return tensor, self.arrangement.order if tensor > 1 and data > 1 else None

    def is_equivalent(self, other: RankLayout[T]) -> bool:
        """Return whether each member computes the same rows with the same shards of the weights; both have one stage."""
        return self.tensor_division == other.tensor_division and self.rows == other.rows


def slice_count(layouts: Iterable[RankLayout[T]]) -> int:
    """Return the number of the finest equal slices into which the tensor degrees of layouts together split weights."""
    return lcm(*(layout.arrangement.tensor for layout in layouts))


def slices_per_member(layout: RankLayout[T], count: int) -> int:
    """Return the number of slices that each member has of weights in `count` equal ones: a multiple of the tensor degree."""
    return count // layout.arrangement.tensor


def slices_of(layout: RankLayout[T], member: T, count: int) -> range:
    """Return the slices that a member has of weights in `count` equal ones."""
    number, first = slices_per_member(layout, count), layout.position_of(member).tensor_rank
    return range(first * number, (first + 1) * number)


def slice_holders(layout: RankLayout[T], number: int, count: int) -> tuple[T, ...]:
    """Return the members that have a slice, by replica, of weights in `count` equal ones."""
    return layout.data_groups[number // slices_per_member(layout, count)]


def node_layouts(stage: Stage) -> tuple[RankLayout[str], ...]:
    """Return the layout of each layer run of a stage, with the names of the devices' nodes as members."""
    nodes = tuple(device.node for device in stage.devices)
    return tuple(RankLayout.of(nodes, run) for run in stage.layers)


class RowOverlap(NamedTuple):
    """Rows of a micro-batch that are in a replica's interval of one layout and in a replica's of another."""

    source_replica: int
    target_replica: int
    start: int
    stop: int


def row_overlaps(source: RankLayout[T], target: RankLayout[T]) -> Iterator[RowOverlap]:
    """Yield the overlaps of the replicas' row intervals, in the order of the rows."""
    sender = receiver = start = 0
    while sender < source.replicas and receiver < target.replicas:
        sender_stop, receiver_stop = source.row_intervals[sender][1], target.row_intervals[receiver][1]
        stop = min(sender_stop, receiver_stop)
        yield RowOverlap(sender, receiver, start, stop)
        start = stop
        sender, receiver = sender + (sender_stop == stop), receiver + (receiver_stop == stop)


class Transfer(NamedTuple, Generic[T]):
    """Message of rows `start … stop - 1` of every micro-batch from one member to another.

    Attributes:
        part: equal slice of these rows' values that it carries.
    """

    source: T
    target: T
    start: int
    stop: int
    part: ShardIndex = WHOLE


class Delivery(NamedTuple, Generic[T]):
    """Message to a rank of a tensor group: an equal slice of values that every rank of another one has."""

    source: T
    target: T
    part: ShardIndex


def deliveries(
    holders: tuple[T, ...], receivers: tuple[T, ...], node_of: Callable[[T], str], *, split: bool
) -> tuple[Delivery[T], ...]:
    """Return the message to each receiver, by tensor rank; `holders` and `receivers` are tensor groups.

    A boundary is replicated over a tensor group. Without `split`, tensor rank k is sent all of it by the holders' rank k
    modulo their number; so is its slice of a boundary that stays divided along the sequence. With it, a boundary crosses
    to a node at most once (Alpa §6, local all-gather): from a holder on their own node receivers are sent all of it, else
    the k receivers on a node are sent one of k equal slices each, which they all-gather.
    """
    nodes = tuple(map(node_of, receivers))
    delivery_list = []
    for index, (receiver, node) in enumerate(zip(receivers, nodes, strict=True)):
        source, part = holders[index % len(holders)], WHOLE
        if split:
            near = tuple(holder for holder in holders if node_of(holder) == node)
            place = nodes[:index].count(node)
            if near:
                source = near[place % len(near)]
            else:
                part = place, nodes.count(node)
        delivery_list.append(Delivery(source, receiver, part))
    return tuple(delivery_list)


def divides_boundary(model: Model, above: LayerRun, below: LayerRun) -> bool:
    """Return whether a boundary between stages stays divided along the sequence, given the layer runs at its sides.

    Then each tensor rank of one stage exchanges its slice with the same tensor rank of the other, and neither gathers
    (Megatron-LM). The layers at both sides must be sequence parallel, at one tensor degree.
    """
    sides = (above, above.end - 1), (below, below.first)
    return above.strategy.tensor == below.strategy.tensor and all(
        model.divides_sequence(model.kind_of(layer), run.strategy) for run, layer in sides
    )


def boundary_transfers(
    source: RankLayout[T], target: RankLayout[T], node_of: Callable[[T], str], *, split: bool = True
) -> tuple[Transfer[T], ...]:
    """Return the messages of overlapping rows from one stage to another, of activations or of gradients."""
    return tuple(
        Transfer(delivery.source, delivery.target, start, stop, delivery.part)
        for sender, receiver, start, stop in row_overlaps(source, target)
        for delivery in deliveries(source.tensor_groups[sender], target.tensor_groups[receiver], node_of, split=split)
    )


def relayout_transfers(old: RankLayout[T], new: RankLayout[T], node_of: Callable[[T], str]) -> tuple[Transfer[T], ...]:
    """Return the row messages between two layouts of a stage, copies within a member included.

    A member keeps its own rows. It receives others from a member on its own node if one has them, else from the one whose
    tensor rank is its own modulo the old degree (Galvatron's Slice-Gather).
    """
    transfers = []
    for sender, receiver, start, stop in row_overlaps(old, new):
        holders = old.tensor_groups[sender]
        for index, member in enumerate(new.tensor_groups[receiver]):
            source = member
            if member not in holders:
                near = [holder for holder in holders if node_of(holder) == node_of(member)] or holders
                source = near[index % len(near)]
            transfers.append(Transfer(source, member, start, stop))
    return tuple(transfers)
