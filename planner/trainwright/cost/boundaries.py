"""Messages between neighbouring stages, and redistribution of rows between layer runs of a stage.

A boundary is the activation between two layers, and its gradient on the way back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from trainwright.cost.collectives import Collectives
from trainwright.cost.network import Edge, Load, Message, Network, Nic
from trainwright.rank_layout import RankLayout, Transfer, relayout_transfers, row_overlaps


class BoundaryMessage(NamedTuple):
    """Message of one replica to another for every micro-batch, in one direction of a boundary.

    Attributes:
        sender: data replica.
        receiver: data replica.
        send_seconds: until the last byte has left, while all messages of the boundary are sent; under FIFO as if sent alone.
        latency_seconds: from then until it has arrived.
        queues: FIFO NICs that it shares with other messages, and the seconds for which it occupies each.
    """

    sender: int
    receiver: int
    send_seconds: float
    latency_seconds: float
    queues: tuple[tuple[Nic, float], ...] = ()


_MessageKey = tuple[tuple[str, ...], tuple[str, ...], int]
"""(sender nodes, receiver nodes, rows): messages with one key are identical and computed once."""
_SendTimes = dict[_MessageKey, tuple[float, tuple[tuple[Nic, float], ...]]]
"""Seconds until a message has left, and the queues that it waits in."""


class BoundaryMessages(NamedTuple):
    """Messages of one direction of a boundary, and the seconds for which they keep every NIC busy."""

    pieces: tuple[BoundaryMessage, ...]
    nic_seconds: Mapping[Nic, float]


_KEPT = 256
"""Boundaries in the cache: plans costed one after the other share most of theirs."""


class BoundaryCache:
    """Least-recently-used cache of a network's boundaries; `collectives` are given where tensor ranks split messages."""

    def __init__(self, network: Network, *, collectives: Collectives | None = None) -> None:
        def between(senders: RankLayout[str], receivers: RankLayout[str], row_bytes: float) -> BoundaryMessages:
            return boundary_messages(senders, receivers, row_bytes, network, collectives=collectives)

        self.messages_between = lru_cache(_KEPT)(between)


def boundary_messages(
    senders: RankLayout[str],
    receivers: RankLayout[str],
    row_bytes: float,
    network: Network,
    *,
    collectives: Collectives | None = None,
) -> BoundaryMessages:
    """Return the messages that cross a boundary for every micro-batch.

    Replicas send at about the same time, so the messages of a boundary share NICs. A receiver's tensor rank k reads from the
    sender's tensor rank k modulo the sender's degree: the unsharded rows or, if `collectives` are given, a 1/degree slice of
    them, which the receiver's tensor group then all-gathers.
    """
    whole_bytes = row_bytes
    row_bytes = row_bytes if collectives is None else row_bytes / receivers.tensor
    pairs = [
        (a, b, (senders.tensor_groups[a], receivers.tensor_groups[b], stop - start))
        for a, b, start, stop in row_overlaps(senders, receivers)
    ]
    alike = Counter(key for _, _, key in pairs)
    edges = {
        key: Counter((key[0][index % senders.tensor], target) for index, target in enumerate(key[1])) for key in alike
    }
    messages = {
        key: Counter({(*edge, key[2] * row_bytes): uses for edge, uses in used.items()}) for key, used in edges.items()
    }
    latencies = {
        key: max(network.link(edge)[0] for edge in used)
        + (0.0 if collectives is None else collectives.all_reduce((key[1],)).all_gather_seconds(key[2] * whole_bytes))
        for key, used in edges.items()
    }
    work = {key: _nic_seconds(own, network) for key, own in messages.items()}
    departures = (
        _queued_send_times(alike, messages, work, network)
        if network.is_fifo
        else _concurrent_send_times(alike, messages, network)
    )
    found = []
    for a, b, key in pairs:
        drain, queues = departures[key]
        found.append(BoundaryMessage(a, b, drain, latencies[key], queues))
    load = Load()
    for key, times in alike.items():
        for card, seconds in work[key].items():
            load[card] += times * seconds
    return BoundaryMessages(tuple(found), load)


def _concurrent_send_times(
    alike: Mapping[_MessageKey, int], messages: Mapping[_MessageKey, Counter[Message]], network: Network
) -> _SendTimes:
    """Return the send times of messages that leave together and share NICs."""
    every: Counter[Message] = Counter()
    for key, times in alike.items():
        for message, uses in messages[key].items():
            every[message] += times * uses
    seconds = network.concurrent_send_seconds(every)
    return {key: (max(seconds[message] for message in own), ()) for key, own in messages.items()}


def _queued_send_times(
    alike: Mapping[_MessageKey, int],
    messages: Mapping[_MessageKey, Counter[Message]],
    nic_seconds: Mapping[_MessageKey, Mapping[Nic, float]],
    network: Network,
) -> _SendTimes:
    """Return the send times of messages that leave alone, with the NIC queues that they share."""
    holders: Counter[Nic] = Counter()
    for key, times in alike.items():
        holders.update(dict.fromkeys(nic_seconds[key], times))
    found = {}
    for key, own in messages.items():
        seconds = network.concurrent_send_seconds(own)
        shared = tuple((card, busy) for card, busy in nic_seconds[key].items() if holders[card] > 1)
        found[key] = max(seconds.values()), shared
    return found


def _nic_seconds(messages: Mapping[Message, int], network: Network) -> dict[Nic, float]:
    """Return the seconds for which messages keep each NIC busy."""
    load: defaultdict[Edge, float] = defaultdict(float)
    for (source, target, size), uses in messages.items():
        load[source, target] += uses * size
    return network.nic_seconds(network.load(load))


@lru_cache(_KEPT)
def _device_transfers(old: RankLayout[str], new: RankLayout[str]) -> tuple[Transfer[int], ...]:
    """Return the rows that change devices, by index, in the order of receivers: sums of seconds depend on the order."""
    transfers = relayout_transfers(old.by_index, new.by_index, old.members.__getitem__)
    return tuple(sorted((one for one in transfers if one.source != one.target), key=attrgetter("target")))


def redistribution_seconds(old: RankLayout[str], new: RankLayout[str], row_bytes: float, network: Network) -> float:
    """Return R(L, S_i, S_j): seconds until every device has its rows of the next layer run, all messages at once.

    Messages between nodes share NICs; inside a node, all that a device sends or receives passes its own port.
    """
    messages: Counter[Message] = Counter()
    ports: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    for source, target, start, stop in _device_transfers(old, new):
        edge, size = (old.members[source], new.members[target]), (stop - start) * row_bytes
        messages[*edge, size] += 1
        if edge[0] == edge[1]:
            seconds = size / network.flow_bytes_per_second(edge)
            ports["out", source, edge[0]] += seconds
            ports["in", target, edge[1]] += seconds
    alone = network.concurrent_send_seconds(messages)
    at_once = max((spent + network.link((a, b))[0] for (a, b, _), spent in alone.items()), default=0.0)
    through = max((busy + network.link((node, node))[0] for (_, _, node), busy in ports.items()), default=0.0)
    return max(at_once, through)
