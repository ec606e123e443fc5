"""Benchmark of links: rounds of disjoint pairs of slots, between nodes and then within every node of several slots.

Collectives and the slowdown of computation follow if the task asks for them.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trainwright.cluster import Link
from trainwright.worker_api import LinkReport, LinkTask
from trainwright_worker.device import barrier, synchronize
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.gathering import gather
from trainwright_worker.gang.rank_assignment import RankAssignment, gang_devices
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.measure import collective_bench, overlap_bench
from trainwright_worker.measure.pair_rounds import (
    Pair,
    disjoint_rounds,
    inter_node_rounds,
    intra_node_rounds,
    round_robin_rounds,
)

_LATENCY_SAMPLES = 21
_MIN_MESSAGE_SECONDS = 0.005
"""Minimum seconds of the largest message, so that its bytes and not its start are timed."""
MAX_MESSAGE_BYTES = 2**28
"""Maximum size: NVLink and 400 Gbit/s take 1 and 5 ms for it."""
_SIZE_RATIO = 4
"""Ratio of the two sizes that are timed, once they have grown."""
_MAX_GROWTH = 16.0
"""Maximum ratio of consecutive sizes, since the first bytes may pass a shaped link unshaped."""
_MAX_DIRECTION_SECONDS = 4.0
"""Maximum seconds of one direction's bandwidth benchmark: slow links get fewer repeats."""
_MIN_DIRECTION_SECONDS = 0.2
"""Minimum seconds of one direction's benchmark, up to 10 × the task's repeats: fast links scatter more."""


def measure_links(task: LinkTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog) -> LinkReport:
    """Measure all links. Every rank returns the same report."""
    gang = task.gang
    link_rounds = [*inter_node_rounds(gang, _node_pair_rounds(task)), *intra_node_rounds(gang)]
    rank_nodes = [own_device.node for own_device in gang_devices(gang)]
    # Where nodes share a machine, concurrent pairs would measure contention for its processors.
    latency_rounds = [[pair] for pairs in link_rounds for pair in pairs] if gang.is_emulated else link_rounds
    latencies: dict[Pair, float] = {}
    for number, pairs in enumerate(latency_rounds):
        watchdog.beat(f"waiting for all ranks before round {number} of latencies")
        barrier(device)
        for pair in pairs:
            if assignment.rank in pair:
                latencies[pair] = _measure_latency(
                    _open_channel(task, assignment.rank, pair, device), starts=assignment.rank == pair[0]
                )
        if assignment.is_main_process:
            report_writer.write_progress(number + 1, len(latency_rounds), "rounds of latencies")
    own_links: list[Link] = []
    for number, pairs in enumerate(link_rounds):
        watchdog.beat(f"waiting for all ranks before round {number}")
        barrier(device)
        for low, high in pairs:
            if assignment.rank in (low, high):
                watchdog.beat(f"measuring {rank_nodes[low]} and {rank_nodes[high]}")
                channel = _open_channel(task, assignment.rank, (low, high), device)
                own_links += _measure_pair_links(
                    task, assignment.rank, (low, high), rank_nodes, channel, latencies[low, high]
                )
        if assignment.is_main_process:
            report_writer.write_progress(number + 1, len(link_rounds), "rounds of links")
    watchdog.beat("gathering the links")
    links_by_rank = gather(tuple(own_links), tuple[Link, ...], device)
    return LinkReport(
        _slowest_per_direction([link for links in links_by_rank for link in links]),
        collective_bench.measure_collectives(task, assignment, device, watchdog) if task.collective_bytes else (),
        overlap_bench.measure_overlaps(task, assignment, device, watchdog) if task.overlap else (),
    )


def grown_message_bytes(message_bytes: int, seconds: float) -> int:
    """Return the size to time next, the same if a message of this size lasts long enough."""
    if seconds >= _MIN_MESSAGE_SECONDS or message_bytes >= MAX_MESSAGE_BYTES:
        return message_bytes
    growth = min(_MIN_MESSAGE_SECONDS / max(seconds, 1e-9), _MAX_GROWTH)
    return min(math.ceil(message_bytes * max(growth, 2.0)), MAX_MESSAGE_BYTES)


def _node_pair_rounds(task: LinkTask) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of node pairs, by their indices in the gang."""
    if task.pairs is None:
        return round_robin_rounds(len(task.gang.nodes))
    node_indices = {node.name: place for place, node in enumerate(task.gang.nodes)}
    return disjoint_rounds((node_indices[one], node_indices[other]) for one, other in task.pairs)


def _slowest_per_direction(links: list[Link]) -> tuple[Link, ...]:
    """Return one link per (source, target): that of the slowest pair of slots, and within a node of both directions.

    A plan may use any slots, and what it computes waits for the slowest.
    """
    slowest: dict[tuple[str, str], Link] = {}
    for link in links:
        known = slowest.get((link.source, link.target))
        if known is None or link.bandwidth_bytes_per_second < known.bandwidth_bytes_per_second:
            slowest[link.source, link.target] = link
    return tuple(slowest[key] for key in sorted(slowest))


@dataclass(frozen=True)
class _PairChannel:
    """Channel to the other end of a pair, with its message buffers."""

    peer: int
    device: torch.device
    small_message: torch.Tensor
    large_message: torch.Tensor

    def with_message_bytes(self, message_bytes: int) -> _PairChannel:
        """Return the channel with room for messages of this size."""
        if message_bytes <= len(self.large_message):
            return self
        return replace(self, large_message=torch.zeros(message_bytes, dtype=torch.uint8, device=self.device))

    def send(self, message: torch.Tensor) -> None:
        dist.send(message, self.peer)
        synchronize(self.device)

    def receive(self, message: torch.Tensor) -> None:
        dist.recv(message, self.peer)
        synchronize(self.device)

    def send_and_confirm(self, message_bytes: int) -> float:
        """Return the seconds to send `message_bytes` bytes and receive a small reply."""
        begin = time.perf_counter()
        self.send(self.large_message[:message_bytes])
        self.receive(self.small_message)
        return time.perf_counter() - begin

    def receive_and_confirm(self, message_bytes: int) -> None:
        """Receive a message of `send_and_confirm` and reply."""
        self.receive(self.large_message[:message_bytes])
        self.send(self.small_message)


def _open_channel(task: LinkTask, rank: int, pair: Pair, device: torch.device) -> _PairChannel:
    """Open this rank's end of the pair."""
    small, large = (
        torch.zeros(size, dtype=torch.uint8, device=device) for size in (task.message_bytes[0], task.message_bytes[-1])
    )
    return _PairChannel(pair[0] + pair[1] - rank, device, small, large)


def _measure_pair_links(  # noqa: PLR0913, PLR0917 (a task, a pair in it, and what was measured before)
    task: LinkTask, rank: int, pair: Pair, rank_nodes: list[str], channel: _PairChannel, latency: float
) -> list[Link]:
    """Measure the link from this rank to its peer; both ends take turns as the sender."""
    links = []
    for sender in pair:
        if rank == sender:
            bandwidth = _measure_bandwidth(task, channel, latency)
            links.append(Link(rank_nodes[rank], rank_nodes[channel.peer], latency, bandwidth))
        else:
            _receive_bandwidth_messages(task, channel)
    return links


def _measure_latency(channel: _PairChannel, *, starts: bool) -> float:
    """Return half of a small message's median round-trip seconds; both ends measure their own."""
    times = []
    for _ in range(_LATENCY_SAMPLES):
        begin = time.perf_counter()
        if starts:
            channel.send(channel.small_message)
            channel.receive(channel.small_message)
        else:
            channel.receive(channel.small_message)
            channel.send(channel.small_message)
        times.append(time.perf_counter() - begin)
    # Either end sees a full period between its own calls; the first one includes the wait for the peer.
    return statistics.median(times[1:]) / 2


def _measure_bandwidth(task: LinkTask, channel: _PairChannel, latency: float) -> float:
    """Return bytes per second to the peer: β = (n2 - n1) / (t2 - t1) over the two largest message sizes.

    A token bucket lets the first bytes pass unshaped, so an untimed large message drains it before each timed one; its
    refill during a reply is the same for both sizes and cancels out. The sender decides sizes and repeats for both ends, by
    times that include the receiver's. Emulated links are slow enough for the task's sizes.
    """
    small, large = task.message_bytes[-2:]
    while True:
        channel.send_and_confirm(large)  # warm-up of both ends
        estimate = channel.send_and_confirm(large)
        next_large = large if task.gang.is_emulated else grown_message_bytes(large, estimate)
        repeats = _repeats(task.repeats, 4 * estimate)
        channel.send(torch.tensor([next_large, repeats], dtype=torch.int64, device=channel.device))
        if next_large == large:
            break
        small, large = next_large // _SIZE_RATIO, next_large
        channel = channel.with_message_bytes(large)
    small_times, large_times = [], []
    for _ in range(repeats):
        channel.send_and_confirm(large)
        small_times.append(channel.send_and_confirm(small))
        channel.send_and_confirm(large)
        large_times.append(channel.send_and_confirm(large))
    large_seconds = statistics.median(large_times)
    difference = large_seconds - statistics.median(small_times)
    if difference <= 0:  # below the clock's scatter: too fast for the size to show
        return large / max(large_seconds - 2 * latency, large_seconds / 2)
    return (large - small) / difference


def _receive_bandwidth_messages(task: LinkTask, channel: _PairChannel) -> None:
    """Receive the messages of `_measure_bandwidth`."""
    small, large = task.message_bytes[-2:]
    decision = torch.zeros(2, dtype=torch.int64, device=channel.device)
    while True:
        channel.receive_and_confirm(large)
        channel.receive_and_confirm(large)
        channel.receive(decision)
        next_large, repeats = decision.tolist()
        if next_large == large:
            break
        small, large = next_large // _SIZE_RATIO, next_large
        channel = channel.with_message_bytes(large)
    for _ in range(repeats):
        channel.receive_and_confirm(large)
        channel.receive_and_confirm(small)
        channel.receive_and_confirm(large)
        channel.receive_and_confirm(large)


def _repeats(ordered: int, cycle_seconds: float) -> int:
    """Return the task's repeats, fewer on slow links and more on fast ones, so that a direction lasts 0.2 to 4 s."""
    fewest = max(1, min(ordered, round(_MAX_DIRECTION_SECONDS / cycle_seconds)))
    stable_repeats = round(_MIN_DIRECTION_SECONDS / cycle_seconds)
    return max(fewest, min(stable_repeats, 10 * ordered))
