"""Messages between neighbouring stages, and redistribution of rows between layer runs of a stage.

A boundary is the activation between two layers, and its gradient on the way back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from trainwright.cost.collectives import Collectives, Nodes
from trainwright.cost.network import Edge, Load, Message, Network, Nic
from trainwright.rank_layout import RankLayout, Transfer, deliveries, relayout_transfers, row_overlaps


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
    """Messages of one direction of a boundary for every micro-batch.

    Attributes:
        nic_seconds: seconds for which they keep every NIC busy.
        gather_seconds: `[receiving replica]` all-gather of slices within nodes, once all have arrived.
    """

    pieces: tuple[BoundaryMessage, ...]
    nic_seconds: Mapping[Nic, float]
    gather_seconds: tuple[float, ...]


_KEPT = 256
"""Boundaries in the cache: plans costed one after the other share most of theirs."""


class BoundaryCache:
    """Least-recently-used cache of a network's boundaries; `collectives` are given where tensor ranks split messages.

    Of a boundary that stays divided along the sequence (`is_divided`) every tensor rank sends its slice.
    """

    def __init__(self, network: Network, *, collectives: Collectives | None = None) -> None:
        def between(
            senders: RankLayout[str], receivers: RankLayout[str], row_bytes: float, *, is_divided: bool = False
        ) -> BoundaryMessages:
            if is_divided:
                return boundary_messages(senders, receivers, row_bytes / senders.arrangement.tensor, network)
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
    """Return the messages that cross a boundary for every micro-batch, split over tensor ranks if `collectives` are given.

    `row_bytes` are those that each sender has: of a boundary that stays divided along the sequence, its slice, which is not
    split further. Replicas send at about the same time, so the messages of a boundary share NICs.
    """
    pairs = [
        (a, b, (senders.tensor_groups[a], receivers.tensor_groups[b], stop - start))
        for a, b, start, stop in row_overlaps(senders, receivers)
    ]
    alike = Counter(key for _, _, key in pairs)
    sent = {key: deliveries(key[0], key[1], str, split=collectives is not None) for key in alike}
    messages = {
        key: Counter((source, target, key[2] * row_bytes / parts) for source, target, (_, parts) in parts_sent)
        for key, parts_sent in sent.items()
    }
    latencies = {
        key: max(network.link((delivery.source, delivery.target))[0] for delivery in parts_sent)
        for key, parts_sent in sent.items()
    }
    work = {key: _nic_seconds(own, network) for key, own in messages.items()}
    departures = (
        _queued_send_times(alike, messages, work, network)
        if network.is_fifo
        else _concurrent_send_times(alike, messages, network)
    )
    boundary_list = []
    for a, b, key in pairs:
        drain, queues = departures[key]
        boundary_list.append(BoundaryMessage(a, b, drain, latencies[key], queues))
    load = Load()
    for key, times in alike.items():
        for card, seconds in work[key].items():
            load[card] += times * seconds
    gather_seconds = [0.0] * receivers.replicas
    if collectives is not None:
        gathered: Counter[tuple[int, Nodes]] = Counter()
        for _, b, key in pairs:
            for node, parts in {(target, parts) for _, target, (_, parts) in sent[key] if parts > 1}:
                gathered[b, (node,) * parts] += key[2]
        for (b, nodes), rows in gathered.items():
            seconds = collectives.all_reduce((nodes,)).all_gather_seconds(rows * row_bytes)
            gather_seconds[b] = max(gather_seconds[b], seconds)
    return BoundaryMessages(tuple(boundary_list), load, tuple(gather_seconds))


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
    send_times = {}
    for key, own in messages.items():
        seconds = network.concurrent_send_seconds(own)
        shared = tuple((card, busy) for card, busy in nic_seconds[key].items() if holders[card] > 1)
        send_times[key] = max(seconds.values()), shared
    return send_times


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
    return tuple(
        sorted((transfer for transfer in transfers if transfer.source != transfer.target), key=attrgetter("target"))
    )


def redistribution_seconds(old: RankLayout[str], new: RankLayout[str], row_bytes: float, network: Network) -> float:
    """Return R(L, S_i, S_j): seconds until every device has its rows of the next layer run, all messages at once.

    Messages between nodes share NICs; inside a node, all that a device sends or receives passes its own port.
    """
    messages: Counter[Message] = Counter()
    ports: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    for transfer in _device_transfers(old, new):
        edge, size = (
            (old.members[transfer.source], new.members[transfer.target]),
            (transfer.stop - transfer.start) * row_bytes,
        )
        messages[*edge, size] += 1
        if edge[0] == edge[1]:
            seconds = size / network.flow_bytes_per_second(edge)
            ports["out", transfer.source, edge[0]] += seconds
            ports["in", transfer.target, edge[1]] += seconds
    alone = network.concurrent_send_seconds(messages)
    at_once = max((spent + network.link((a, b))[0] for (a, b, _), spent in alone.items()), default=0.0)
    through = max((busy + network.link((node, node))[0] for (_, _, node), busy in ports.items()), default=0.0)
    return max(at_once, through)
