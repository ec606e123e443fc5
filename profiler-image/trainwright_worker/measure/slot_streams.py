"""Benchmark of what all slots of two nodes send to each other at once: nodes may have several NICs, or streams a limit."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from trainwright.cluster import Link
from trainwright.worker_api import LinkTask
from trainwright_worker.device import barrier
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.rank_assignment import RankAssignment, gang_devices
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.measure.pair_channel import PairChannel, open_channel
from trainwright_worker.measure.pair_rounds import Pair, all_slot_rounds

_SECONDS = 0.2
"""Approximate seconds of the streams of one direction: what the first to end leave to the others then matters little."""
_MIN_GAIN = 1.1
"""Minimum ratio of all streams to a single one: less is the scatter of both measurements."""


@dataclass(frozen=True, slots=True)
class SlotStream:
    """Bytes that a slot sent to the same slot of another node, and its seconds, while the other slots of both did the same."""

    source: str
    target: str
    sent_bytes: int
    seconds: float


def measure_slot_streams(
    task: LinkTask,
    node_rounds: Sequence[Iterable[Pair]],
    assignment: RankAssignment,
    device: torch.device,
    watchdog: Watchdog,
) -> tuple[SlotStream, ...]:
    """Measure the streams that this rank sends, in rounds of node pairs; none where no two nodes have several slots.

    Emulated slots share their node's link, of which a single stream takes everything.
    """
    rounds = [] if task.gang.is_emulated else all_slot_rounds(task.gang, node_rounds)
    nodes = [own_device.node for own_device in gang_devices(task.gang)]
    streams = []
    for number, pairs in enumerate(rounds):
        pair = next((pair for pair in pairs if assignment.rank in pair), None)
        channel = None if pair is None else open_channel(task, assignment.rank, pair, device)
        wait = partial(_wait_for_all, watchdog=watchdog, device=device, number=number)
        for end in range(2):
            if channel is None or pair is None:
                wait("try sizes")
                wait("send")
            elif pair[end] == assignment.rank:
                sent_bytes, seconds = _send_stream(channel, task.message_bytes[-1], wait)
                streams.append(SlotStream(nodes[assignment.rank], nodes[channel.peer], sent_bytes, seconds))
            else:
                _receive_stream(channel, task.message_bytes[-1], wait)
        if assignment.is_main_process:
            report_writer.write_progress(number + 1, len(rounds), "rounds of all slots")
    return tuple(streams)


def _wait_for_all(step: str, *, watchdog: Watchdog, device: torch.device, number: int) -> None:
    watchdog.beat(f"waiting for all ranks to {step} in round {number} of all slots")
    barrier(device)


def _send_stream(channel: PairChannel, first_bytes: int, wait: Callable[[str], None]) -> tuple[int, float]:
    """Return the bytes that this rank sent and their seconds; sizes are tried while the other slots try theirs."""
    wait("try sizes")
    channel, message_bytes, seconds = channel.grow_messages(first_bytes)
    repeats = max(math.ceil(_SECONDS / seconds), 1)
    channel.send_number(repeats)
    wait("send")
    begin = time.perf_counter()
    for _ in range(repeats):
        channel.send_and_confirm(message_bytes)
    return repeats * message_bytes, time.perf_counter() - begin


def _receive_stream(channel: PairChannel, first_bytes: int, wait: Callable[[str], None]) -> None:
    """Receive what `_send_stream` sends."""
    wait("try sizes")
    channel, message_bytes = channel.receive_growing_messages(first_bytes)
    repeats = channel.receive_number()
    wait("send")
    for _ in range(repeats):
        channel.receive_and_confirm(message_bytes)


def links_with_all_slots(links: Iterable[Link], streams: Iterable[SlotStream]) -> tuple[Link, ...]:
    """Return the links with the bandwidth of all slots at once; that of a single stream becomes their `flow`.

    All bytes count by the seconds of the slowest stream, so that no link is promised what its streams reach only on average.
    A link whose slots reach no more together than one alone stays as it is.
    """
    of_edge: defaultdict[tuple[str, str], list[SlotStream]] = defaultdict(list)
    for stream in streams:
        of_edge[stream.source, stream.target].append(stream)
    links_with_slots = []
    for link in links:
        slots = of_edge.get((link.source, link.target), [])
        alone = link.bandwidth_bytes_per_second
        together = sum(stream.sent_bytes for stream in slots) / max(
            (stream.seconds for stream in slots), default=math.inf
        )
        is_faster = together > _MIN_GAIN * alone
        links_with_slots.append(
            replace(link, bandwidth_bytes_per_second=together, flow_bytes_per_second=alone) if is_faster else link
        )
    return tuple(links_with_slots)
