"""By how much computation slows down while the device communicates."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from trainwright.cluster import EMULATED_PREFIX
from trainwright.orders import LinksOrder, Overlap
from trainwright_worker.clock import Clock
from trainwright_worker.collectives import Circle, group_of, group_stages
from trainwright_worker.executor.messages import present
from trainwright_worker.seat import Seat
from trainwright_worker.watchdog import Watchdog

_REPEATS = 15
_WIDTHS = {"cpu": 128, "cuda": 4096}
"""Of the square matrices that are multiplied: large enough to keep a device of that type busy."""
_SHORTEST_SECONDS = 0.02
"""A message takes at least about this long, so that its start and its end do not count."""
_FIRST_BYTES, _MOST_BYTES = 2**18, 2**30
_MOST_PRODUCTS = 10_000
_COVERED = 0.9
"""Computation that ends within so much of the message's time was slowed down from its start to its end."""


def measure(order: LinksOrder, seat: Seat, device: torch.device, watchdog: Watchdog) -> tuple[Overlap, ...]:
    """One figure for every node that has a partner, where devices are real. Every rank of the gang returns the same.

    A message is summed inside a node that has several devices, else over one device of each node. An emulated device's
    computation is a wait, which nothing slows down: there is nothing to find out then.
    """
    if any(node.accelerator.startswith(EMULATED_PREFIX) for node in order.gang.nodes):
        return ()
    own: list[Overlap] = []
    for stage in group_stages(order.gang)[:2]:
        watchdog.beat("measuring how communication slows computation down")
        made = {ranks: group_of(order.gang, ranks) for ranks in stage}
        dist.barrier()
        for ranks, group in made.items():
            if seat.rank in ranks:
                own.append(_measure(Circle(ranks, group, device), seat.device.node))
        dist.barrier()
        for ranks, group in made.items():
            if seat.rank in ranks:
                dist.destroy_process_group(group)
    everyone: list[list[Overlap]] = [[] for _ in range(seat.world_size)]
    dist.all_gather_object(everyone, own[:1])
    found = {one.node: one for ranks in reversed(everyone) for one in ranks}  # the first rank of a node speaks
    return tuple(found[node.name] for node in order.gang.nodes if node.name in found)


def _measure(circle: Circle, node: str) -> Overlap:
    message, message_seconds = _message(circle)
    width = _WIDTHS[circle.device.type]
    left, right = torch.rand(2, width, width, device=circle.device)
    out = torch.empty_like(left)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    compute(3)  # warm-up
    ten = circle.median([_alone(circle, partial(compute, 10)) for _ in range(_REPEATS)])
    products = min(max(round(message_seconds / (ten / 10) / 2), 1), _MOST_PRODUCTS)
    while True:
        work = partial(compute, products)
        # In turns, so that what else happens on the machine slows both down alike.
        runs = [(_alone(circle, work), *_beside(circle, message, work)) for _ in range(_REPEATS)]
        computed, whole = circle.median([one[1] for one in runs]), circle.median([one[2] for one in runs])
        if products == 1 or computed <= _COVERED * whole:
            return Overlap(node, statistics.median(beside / alone for alone, beside, _ in runs))
        products //= 2  # the message was over before


def _message(circle: Circle) -> tuple[torch.Tensor, float]:
    """A message that takes long enough to sum, and how long."""
    size = _FIRST_BYTES
    while True:
        message = torch.zeros(size // 4, device=circle.device)
        work = partial(dist.all_reduce, message, group=circle.group)
        circle.timed(work)
        seconds = circle.median([circle.timed(work) for _ in range(_REPEATS)])
        if seconds >= _SHORTEST_SECONDS or size >= _MOST_BYTES:
            return message, seconds
        size *= 4


def _alone(circle: Circle, work: Callable[[], object]) -> float:
    """Seconds of computation while nothing is under way."""
    clock = Clock(circle.device)
    circle.meet()
    begin = clock.mark()
    work()
    end = clock.mark()
    clock.settle()
    return clock.seconds(begin, end)


def _beside(circle: Circle, message: torch.Tensor, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of computation that begins together with a message, and until the message is there as well."""
    clock = Clock(circle.device)
    circle.meet()
    begin = clock.mark()
    sent = present(dist.all_reduce(message, group=circle.group, async_op=True))
    work()
    computed = clock.mark()
    sent.wait()
    end = clock.mark()
    clock.settle()
    return clock.seconds(begin, computed), clock.seconds(begin, end)
