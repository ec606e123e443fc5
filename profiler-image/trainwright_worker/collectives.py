"""Collectives on the links as they are: inside every node, over the nodes, and over all devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainwright.cluster import Device
from trainwright.orders import CollectiveKind, CollectiveTime, Gang, LinksOrder
from trainwright_worker.device import synchronize
from trainwright_worker.seat import Seat, gang_devices
from trainwright_worker.watchdog import Watchdog

Ranks = tuple[int, ...]

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
_MOST_REPEATS = 50
_VALUE_BYTES = 4
_LARGEST_SHARE = 0.1
"""Of all the time, for one message. In proportion to the size before it, a message's time is estimated from above."""


def measure(order: LinksOrder, seat: Seat, device: torch.device, watchdog: Watchdog) -> tuple[CollectiveTime, ...]:
    """All that the order asks for, in about `collective_seconds`. Every rank of the gang returns the same.

    A size that may take longer than a tenth of the time is left out, and so are larger ones.
    """
    watchdog.beat("making the groups of the collectives")
    own: list[CollectiveTime] = []
    stages = group_stages(order.gang)
    measured = max(len(stages) * len(KINDS) * len(order.collective_bytes), 1)
    for stage in stages:
        made = {ranks: group_of(order.gang, ranks) for ranks in stage}
        dist.barrier()
        for ranks, group in made.items():
            if seat.rank in ranks:
                circle = Circle(ranks, group, device)
                for kind in KINDS:
                    watchdog.beat(f"measuring {kind} of {len(ranks)} devices")
                    own += _measure_kind(order, circle, kind, order.collective_seconds / measured)
        dist.barrier()
        for ranks, group in made.items():
            if seat.rank in ranks:
                dist.destroy_process_group(group)
    everyone: list[list[CollectiveTime]] = [[] for _ in range(seat.world_size)]
    devices = gang_devices(order.gang)
    dist.all_gather_object(everyone, [one for one in own if one.members[0] == devices[seat.rank]])
    return tuple(one for found in everyone for one in found)


def group_stages(gang: Gang) -> list[list[Ranks]]:
    """Groups of ranks; those of a stage have no device in common and are measured at the same time.

    First every node by itself; then one device of each node; last all devices, where that is more than either.
    """
    nodes: list[Ranks] = []
    for node in gang.nodes:
        first = sum(len(one) for one in nodes)
        nodes.append(tuple(range(first, first + len(node.slots))))
    everyone = tuple(rank for node in nodes for rank in node)
    inside = [ranks for ranks in nodes if len(ranks) > 1]
    over = tuple(ranks[0] for ranks in nodes)
    stages = [inside, [over] if len(over) > 1 else [], [everyone] if everyone not in {over, nodes[0]} else []]
    return [stage for stage in stages if stage]


def group_of(gang: Gang, ranks: Ranks) -> dist.ProcessGroup:
    """A process group; all ranks of the gang make it together."""
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timedelta(seconds=1.5 * gang.collective_timeout_seconds)
    )
    return made


@dataclass(frozen=True)
class Circle:
    """The members of a group, this rank among them."""

    ranks: Ranks
    group: dist.ProcessGroup
    device: torch.device

    def slowest(self, seconds: list[float]) -> list[float]:
        """Of several durations, each the slowest member's: the same on every member."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return found.tolist()

    def median(self, seconds: list[float]) -> float:
        """Of repeats, each as long as the slowest member's: the same on every member."""
        return statistics.median(self.slowest(seconds))

    def meet(self) -> None:
        """Until all members are here and their devices idle."""
        dist.barrier(group=self.group)
        synchronize(self.device)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of a piece of work that all members begin together."""
        self.meet()
        begin = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - begin


def _measure_kind(order: LinksOrder, circle: Circle, kind: CollectiveKind, seconds: float) -> Iterator[CollectiveTime]:
    devices = gang_devices(order.gang)
    members = tuple[Device, ...](devices[rank] for rank in circle.ranks)
    before: tuple[int, float] | None = None
    for size in order.collective_bytes:
        if before is not None and before[1] * size / before[0] > _LARGEST_SHARE * order.collective_seconds:
            return
        values = values_of(size, len(members))
        work = operation(kind, circle, values)
        circle.timed(work)  # warm-up: connections are made
        estimate = circle.median([circle.timed(work)])
        repeats = min(max(round(seconds / estimate), 1), _MOST_REPEATS)
        median = circle.median([circle.timed(work) for _ in range(repeats)]) if repeats > 1 else estimate
        before = size, median
        yield CollectiveTime(kind, members, values * _VALUE_BYTES, median, repeats)


def values_of(message_bytes: int, members: int) -> int:
    """Values of a message of about that size which every member has an equal part of."""
    return max(round(message_bytes / _VALUE_BYTES / members), 1) * members


def operation(kind: CollectiveKind, circle: Circle, values: int) -> Callable[[], object]:
    """The collective of a whole message of so many values: reduced, gathered together, or reduced and shared out."""
    whole = torch.zeros(values, device=circle.device)
    part = torch.zeros(values // len(circle.ranks), device=circle.device)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=circle.group)
        case "all_gather":
            return lambda: dist.all_gather_single(whole, part, group=circle.group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_single(part, whole, group=circle.group)
