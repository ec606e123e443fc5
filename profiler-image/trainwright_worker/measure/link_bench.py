"""Benchmark of links: rounds of disjoint pairs of slots, between nodes and then within every node of several slots.

All slots of two nodes at once follow, and collectives and the slowdown of computation if the task asks for them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from trainwright.cluster import Link
from trainwright.worker_api import LinkReport, LinkTask
from trainwright_worker.device import barrier
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.gathering import gather
from trainwright_worker.gang.rank_assignment import RankAssignment, gang_devices
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.measure import collective_bench, overlap_bench, slot_streams
from trainwright_worker.measure.pair_channel import PairChannel, open_channel
from trainwright_worker.measure.pair_rounds import (
    Pair,
    disjoint_rounds,
    inter_node_rounds,
    intra_node_rounds,
    round_robin_rounds,
)
from trainwright_worker.measure.slot_streams import SlotStream

_LATENCY_SAMPLES = 21
_SIZE_RATIO = 4
"""Ratio of the two sizes that are timed, once they have grown."""
_MAX_DIRECTION_SECONDS = 4.0
"""Maximum seconds of one direction's bandwidth benchmark: slow links get fewer repeats."""
_MIN_DIRECTION_SECONDS = 0.2
"""Minimum seconds of one direction's benchmark, up to 10 × the task's repeats: fast links scatter more."""
_MIN_BOUNDING_SECONDS = 0.0025
"""Minimum seconds of a message that bounds the bandwidth: half of what `pair_channel` grows messages to.

The one time that ended the growth was at least 5 ms; the median of the benchmark may be less.
"""


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """Size of a message, and the median seconds until its receiver's reply."""

    message_bytes: int
    seconds: float


def measure_links(task: LinkTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog) -> LinkReport:
    """Measure all links. Every rank returns the same report."""
    gang = task.gang
    node_rounds = _node_pair_rounds(task)
    link_rounds = [*inter_node_rounds(gang, node_rounds), *intra_node_rounds(gang)]
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
                    open_channel(task, assignment.rank, pair, device), starts=assignment.rank == pair[0]
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
                channel = open_channel(task, assignment.rank, (low, high), device)
                own_links += _measure_pair_links(
                    task, assignment.rank, (low, high), rank_nodes, channel, latencies[low, high]
                )
        if assignment.is_main_process:
            report_writer.write_progress(number + 1, len(link_rounds), "rounds of links")
    own_streams = slot_streams.measure_slot_streams(task, node_rounds, assignment, device, watchdog)
    watchdog.beat("gathering the links")
    links_by_rank = gather(tuple(own_links), tuple[Link, ...], device)
    streams_by_rank = gather(own_streams, tuple[SlotStream, ...], device)
    links = _slowest_per_direction([link for links in links_by_rank for link in links])
    streams = [stream for streams in streams_by_rank for stream in streams]
    return LinkReport(
        slot_streams.links_with_all_slots(links, streams),
        collective_bench.measure_collectives(task, assignment, device, watchdog) if task.collective_bytes else (),
        overlap_bench.measure_overlaps(task, assignment, device, watchdog) if task.overlap else (),
    )


def _node_pair_rounds(task: LinkTask) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of node pairs, by their indices in the gang."""
    if task.pairs is None:
        return round_robin_rounds(len(task.gang.nodes))
    node_indices = {node.name: place for place, node in enumerate(task.gang.nodes)}
    return disjoint_rounds((node_indices[name], node_indices[other]) for name, other in task.pairs)


def _slowest_per_direction(links: list[Link]) -> tuple[Link, ...]:
    """Return one link per (source, target): that of the slowest pair of slots, and within a node of both directions.

    A plan may use any slots, and what it computes waits for the slowest.
    """
    slowest: dict[tuple[str, str], Link] = {}
    for link in links:
        slowest_link = slowest.get((link.source, link.target))
        if slowest_link is None or link.bandwidth_bytes_per_second < slowest_link.bandwidth_bytes_per_second:
            slowest[link.source, link.target] = link
    return tuple(slowest[key] for key in sorted(slowest))


def _measure_pair_links(  # noqa: PLR0913, PLR0917 (a task, a pair in it, and what was measured before)
    task: LinkTask, rank: int, pair: Pair, rank_nodes: list[str], channel: PairChannel, latency: float
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


def _measure_latency(channel: PairChannel, *, starts: bool) -> float:
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


def _measure_bandwidth(task: LinkTask, channel: PairChannel, latency: float) -> float:
    """Return bytes per second to the peer, by the times of the two largest message sizes.

    A token bucket lets the first bytes pass unshaped, so an untimed large message drains it before each timed one; its
    refill during a reply is the same for both sizes and cancels out. The sender decides sizes and repeats for both ends, by
    times that include the receiver's.
    """
    channel, large, estimate = channel.grow_messages(task.message_bytes[-1], is_fixed=task.gang.is_emulated)
    small = _smaller_size(task, large)
    repeats = _repeats(task.repeats, 4 * estimate)
    channel.send_number(repeats)
    small_times, large_times = [], []
    for _ in range(repeats):
        channel.send_and_confirm(large)
        small_times.append(channel.send_and_confirm(small))
        channel.send_and_confirm(large)
        large_times.append(channel.send_and_confirm(large))
    return fitted_bandwidth(
        TimedMessage(small, statistics.median(small_times)),
        TimedMessage(large, statistics.median(large_times)),
        latency,
        is_emulated=task.gang.is_emulated,
    )


def fitted_bandwidth(small: TimedMessage, large: TimedMessage, latency: float, *, is_emulated: bool) -> float:
    """Return bytes per second: β = (n2 - n1) / (t2 - t1), on real devices at most n2 / (t2 - 2 latency).

    The difference of two scattering times has no lower bound, so β alone has no upper one. The bound takes start-up beyond the
    latency for transfer, of which a message of several milliseconds has little. Messages of emulated devices may be short.
    """
    difference = large.seconds - small.seconds
    payload_seconds = large.seconds - 2 * latency
    if difference <= 0:  # below the clock's scatter: too fast for the size to show
        return large.message_bytes / max(payload_seconds, large.seconds / 2)
    slope = (large.message_bytes - small.message_bytes) / difference
    if is_emulated or large.seconds < _MIN_BOUNDING_SECONDS or payload_seconds <= 0:
        return slope
    return min(slope, large.message_bytes / payload_seconds)


def _receive_bandwidth_messages(task: LinkTask, channel: PairChannel) -> None:
    """Receive the messages of `_measure_bandwidth`."""
    channel, large = channel.receive_growing_messages(task.message_bytes[-1])
    small = _smaller_size(task, large)
    for _ in range(channel.receive_number()):
        channel.receive_and_confirm(large)
        channel.receive_and_confirm(small)
        channel.receive_and_confirm(large)
        channel.receive_and_confirm(large)


def _smaller_size(task: LinkTask, large: int) -> int:
    """Return the size that is timed beside `large`: the task's, unless it has grown."""
    return task.message_bytes[-2] if large == task.message_bytes[-1] else large // _SIZE_RATIO


def _repeats(ordered: int, cycle_seconds: float) -> int:
    """Return the task's repeats, fewer on slow links and more on fast ones, so that a direction lasts 0.2 to 4 s."""
    fewest = max(1, min(ordered, round(_MAX_DIRECTION_SECONDS / cycle_seconds)))
    stable_repeats = round(_MIN_DIRECTION_SECONDS / cycle_seconds)
    return max(fewest, min(stable_repeats, 10 * ordered))
