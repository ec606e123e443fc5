"""Link measuring: between nodes in rounds of disjoint pairs, then within every node that has two slots.

Collectives and the slow-down of computation follow where they are asked for.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainwright.cluster import Link
from trainwright.orders import Gang, LinksOrder, LinksReport
from trainwright_worker import collectives, output, overlap
from trainwright_worker.device import synchronize
from trainwright_worker.seat import Seat, gang_devices
from trainwright_worker.tournament import Pair, rounds, rounds_of
from trainwright_worker.watchdog import Watchdog

_LATENCY_EXCHANGES = 21
_DIRECTION_SECONDS = 4.0
"""A direction's bandwidth takes at most about this long: slow links are measured with fewer repeats."""
_SETTLED_SECONDS = 0.2
"""A direction is measured at least about this long, up to 10 × the ordered repeats: fast links scatter more."""


def run(order: LinksOrder, seat: Seat, device: torch.device, watchdog: Watchdog) -> LinksReport:
    """Measure all links. Every rank returns the same report."""
    gang = order.gang
    firsts = _first_ranks(gang)
    meetings = [[(firsts[a], firsts[b]) for a, b in pairs] for pairs in _rounds(order) if pairs]
    within = [(first, first + 1) for node, first in zip(gang.nodes, firsts, strict=True) if len(node.slots) > 1]
    if within:
        meetings.append(within)
    names = [own_device.node for own_device in gang_devices(gang)]
    # Where nodes share a machine, pairs that meet at once wait for its processors in place of their link.
    alone = [[pair] for pairs in meetings for pair in pairs] if gang.is_emulated else meetings
    latencies: dict[Pair, float] = {}
    for number, pairs in enumerate(alone):
        watchdog.beat(f"waiting for all ranks before round {number} of latencies")
        dist.barrier()
        for pair in pairs:
            if seat.rank in pair:
                latencies[pair] = _latency(_wire(order, seat.rank, pair, device), starts=seat.rank == pair[0])
        if seat.is_speaker:
            output.progress(number + 1, len(alone), "rounds of latencies")
    own: list[Link] = []
    for number, pairs in enumerate(meetings):
        watchdog.beat(f"waiting for all ranks before round {number}")
        dist.barrier()
        for low, high in pairs:
            if seat.rank in (low, high):
                watchdog.beat(f"measuring {names[low]} and {names[high]}")
                wire = _wire(order, seat.rank, (low, high), device)
                own += _measure_pair(order, seat.rank, (low, high), names, wire, latencies[low, high])
        if seat.is_speaker:
            output.progress(number + 1, len(meetings), "rounds of links")
    watchdog.beat("gathering the links")
    everyone: list[list[Link]] = [[] for _ in range(seat.world_size)]
    dist.all_gather_object(everyone, own)
    return LinksReport(
        _one_per_direction([link for links in everyone for link in links]),
        collectives.measure(order, seat, device, watchdog) if order.collective_bytes else (),
        overlap.measure(order, seat, device, watchdog) if order.overlap else (),
    )


def _rounds(order: LinksOrder) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of pairs of nodes, by their places in the gang."""
    if order.pairs is None:
        return rounds(len(order.gang.nodes))
    places = {node.name: place for place, node in enumerate(order.gang.nodes)}
    return rounds_of((places[one], places[other]) for one, other in order.pairs)


def _first_ranks(gang: Gang) -> list[int]:
    """The logical rank of each node's first process."""
    firsts, total = [], 0
    for node in gang.nodes:
        firsts.append(total)
        total += len(node.slots)
    return firsts


def _one_per_direction(links: list[Link]) -> tuple[Link, ...]:
    """One link for each (source, target): within a node both directions were measured, and the slower one counts."""
    found: dict[tuple[str, str], Link] = {}
    for link in links:
        known = found.get((link.source, link.target))
        if known is None or link.bandwidth_bytes_per_second < known.bandwidth_bytes_per_second:
            found[link.source, link.target] = link
    return tuple(found[key] for key in sorted(found))


@dataclass(frozen=True)
class _Wire:
    """The other end of a pair, and the messages that go there and come from it."""

    peer: int
    device: torch.device
    small: torch.Tensor
    large: torch.Tensor

    def send(self, message: torch.Tensor) -> None:
        dist.send(message, self.peer)
        synchronize(self.device)

    def receive(self, message: torch.Tensor) -> None:
        dist.recv(message, self.peer)
        synchronize(self.device)

    def deliver(self, message_bytes: int) -> float:
        """Seconds to send that many bytes and to get a small answer."""
        begin = time.perf_counter()
        self.send(self.large[:message_bytes])
        self.receive(self.small)
        return time.perf_counter() - begin

    def accept(self, message_bytes: int) -> None:
        """The other end of `deliver`."""
        self.receive(self.large[:message_bytes])
        self.send(self.small)


def _wire(order: LinksOrder, rank: int, pair: Pair, device: torch.device) -> _Wire:
    """This rank's end of the pair."""
    small, large = (
        torch.zeros(size, dtype=torch.uint8, device=device)
        for size in (order.message_bytes[0], order.message_bytes[-1])
    )
    return _Wire(pair[0] + pair[1] - rank, device, small, large)


def _measure_pair(  # noqa: PLR0913, PLR0917 (an order, a place in it, and what was measured before)
    order: LinksOrder, rank: int, pair: Pair, names: list[str], wire: _Wire, latency: float
) -> list[Link]:
    """The link from this rank to the other one of the pair; both ends take turns as the sender."""
    found = []
    for sender in pair:
        if rank == sender:
            bandwidth = _bandwidth_of_sender(order, wire, latency)
            found.append(Link(names[rank], names[wire.peer], latency, bandwidth))
        else:
            _answer_sender(order, wire)
    return found


def _latency(wire: _Wire, *, starts: bool) -> float:
    """Half of the median time that a small message takes there and back, in seconds; both ends measure their own."""
    times = []
    for _ in range(_LATENCY_EXCHANGES):
        begin = time.perf_counter()
        if starts:
            wire.send(wire.small)
            wire.receive(wire.small)
        else:
            wire.receive(wire.small)
            wire.send(wire.small)
        times.append(time.perf_counter() - begin)
    # Either end sees a full period between its own calls; the first one includes the wait for the other end.
    return statistics.median(times[1:]) / 2


def _bandwidth_of_sender(order: LinksOrder, wire: _Wire, latency: float) -> float:
    """Bytes per second from here to the peer: β = (n2 - n1) / (t2 - t1) over the two largest message sizes.

    Behind a token bucket the first bytes pass unshaped. So a large message, which is not measured, empties the bucket
    before each measured one; what refills during an answer is the same for both sizes and leaves the slope alone.
    """
    small, large = order.message_bytes[-2:]
    wire.deliver(large)  # warm-up of both ends
    estimate = wire.deliver(large)
    repeats = _repeats(order.repeats, 4 * estimate)
    wire.send(torch.tensor([repeats], dtype=torch.int64, device=wire.device))
    small_times, large_times = [], []
    for _ in range(repeats):
        wire.deliver(large)
        small_times.append(wire.deliver(small))
        wire.deliver(large)
        large_times.append(wire.deliver(large))
    slower = statistics.median(large_times)
    difference = slower - statistics.median(small_times)
    if difference <= 0:  # within the clock's scatter: so fast that the size does not show
        return large / max(slower - 2 * latency, slower / 2)
    return (large - small) / difference


def _answer_sender(order: LinksOrder, wire: _Wire) -> None:
    """The receiving end of `_bandwidth_of_sender`."""
    small, large = order.message_bytes[-2:]
    wire.accept(large)
    wire.accept(large)
    told = torch.zeros(1, dtype=torch.int64, device=wire.device)
    wire.receive(told)
    for _ in range(int(told.item())):
        wire.accept(large)
        wire.accept(small)
        wire.accept(large)
        wire.accept(large)


def _repeats(ordered: int, cycle_seconds: float) -> int:
    """The ordered repeats, fewer on slow links and more on fast ones, so that a direction lasts 0.2 to 4 s."""
    fewest = max(1, min(ordered, round(_DIRECTION_SECONDS / cycle_seconds)))
    wished = round(_SETTLED_SECONDS / cycle_seconds)
    return max(fewest, min(wished, 10 * ordered))
