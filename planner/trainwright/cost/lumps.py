"""Workers that are alike, taken for one: they do the same at the same time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from trainwright.cost.queues import QueuedReplay
from trainwright.cost.replay import Channel, Replay, Timeline, Work
from trainwright.plan import Schedule


@dataclass(frozen=True, slots=True)
class Lumped:
    """A pipeline's work with like workers lumped together.

    Attributes:
        lump_of: by worker: its lump.
        works: by lump.
        channels: between lumps; those with the same ends and durations are one.
    """

    lump_of: tuple[int, ...]
    works: tuple[Work, ...]
    channels: tuple[Channel, ...]


def lump(works: Sequence[Work], channels: Sequence[Channel]) -> Lumped:
    """The coarsest lumps whose workers take the same times and wait for the same lumps by the same channels.

    That makes the replay of the lumps exact: workers of a lump start and end together, by induction over the
    operations.
    """
    colours, count = _numbered(works)
    while channels:
        inputs: list[set[Hashable]] = [set() for _ in works]
        for channel in channels:
            key = (channel.direction, colours[channel.sender], channel.drain_seconds, channel.latency_seconds)
            inputs[channel.receiver].add(key)
        finer, new_count = _numbered([(c, frozenset(i)) for c, i in zip(colours, inputs, strict=True)])
        if new_count == count:
            break
        colours, count = finer, new_count
    first: dict[int, int] = {}
    for worker, colour in enumerate(colours):
        first.setdefault(colour, worker)
    chosen = set(first.values())
    between = dict.fromkeys(
        Channel(colours[c.sender], colours[c.receiver], c.direction, c.drain_seconds, c.latency_seconds)
        for c in channels
        if c.receiver in chosen
    )
    return Lumped(tuple(colours), tuple(works[first[colour]] for colour in range(count)), tuple(between))


def replay_lumped(
    schedule: Schedule, micro_batches: int, works: Sequence[Work], channels: Sequence[Channel]
) -> Timeline:
    """The replay of all workers, by their lumps; parts of the pipeline that never wait for each other go by themselves.

    Where messages queue, workers that are alike get theirs one after the other: then there are no lumps.
    """
    if any(channel.queues for channel in channels):
        return QueuedReplay(schedule, micro_batches, works, channels).run()
    lumped = lump(works, channels)
    count = len(lumped.works)
    ends, transit, idle = [0.0] * count, [0.0] * count, [0.0] * count
    for part in _parts(lumped):
        number = {worker: index for index, worker in enumerate(part)}
        found = Replay(
            schedule,
            micro_batches,
            [lumped.works[worker] for worker in part],
            [
                Channel(number[c.sender], number[c.receiver], c.direction, c.drain_seconds, c.latency_seconds)
                for c in lumped.channels
                if c.receiver in number
            ],
        ).run()
        for index, worker in enumerate(part):
            ends[worker], transit[worker], idle[worker] = found.ends[index], found.transit[index], found.idle[index]
    return Timeline(*(tuple(values[lump] for lump in lumped.lump_of) for values in (ends, transit, idle)))


def _numbered(values: Sequence[Hashable]) -> tuple[list[int], int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values], len(numbers)


def _parts(lumped: Lumped) -> list[list[int]]:
    """Connected parts, each ascending."""
    parent = list(range(len(lumped.works)))

    def root(worker: int) -> int:
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker

    for channel in lumped.channels:
        parent[root(channel.sender)] = root(channel.receiver)
    found: dict[int, list[int]] = {}
    for worker in range(len(parent)):
        found.setdefault(root(worker), []).append(worker)
    return list(found.values())
