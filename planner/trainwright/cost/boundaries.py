"""Rows that move: between neighbouring stages, and inside a stage where its layers are arranged anew."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from trainwright.cost.collectives import Collectives
from trainwright.cost.fabric import Card, Edge, Fabric, Load, Message
from trainwright.cost.seats import Seats, overlaps


class Piece(NamedTuple):
    """What one replica sends another for every micro-batch, in one direction.

    Attributes:
        drain_seconds: until the last byte has left, while all pieces of the boundary leave; where they queue, alone.
        latency_seconds: from there until it has arrived.
        queues: the cards that it waits for, where it shares them with other pieces and they queue, and for how many
            seconds it keeps each.
    """

    sender: int
    receiver: int
    drain_seconds: float
    latency_seconds: float
    queues: tuple[tuple[Card, float], ...] = ()


_Kind = tuple[tuple[str, ...], tuple[str, ...], int]
"""Pieces between the same nodes with as many rows are alike: looked at once, however many there are."""
_Departures = dict[_Kind, tuple[float, tuple[tuple[Card, float], ...]]]
"""Seconds until a piece has left, and the queues that it waits in."""


class Boundary(NamedTuple):
    """One boundary in one direction: its pieces, and for how many seconds they keep every network card busy."""

    pieces: tuple[Piece, ...]
    cards: Mapping[Card, float]


_KEPT = 256
"""Boundaries that are remembered: plans that are costed one after the other have most of theirs in common."""


class Boundaries:
    """Boundaries of one fabric, each looked at once as long as it is remembered.

    `gathers` are given where boundaries are split.
    """

    def __init__(self, fabric: Fabric, *, gathers: Collectives | None = None) -> None:
        def between(senders: Seats, receivers: Seats, row_bytes: float) -> Boundary:
            return boundary(senders, receivers, row_bytes, fabric, gathers=gathers)

        self.between = lru_cache(_KEPT)(between)


def boundary(
    senders: Seats, receivers: Seats, row_bytes: float, fabric: Fabric, *, gathers: Collectives | None = None
) -> Boundary:
    """What goes over a boundary for every micro-batch.

    Replicas are alike and send at about the same time, so the pieces of a boundary share the cards. The receiver with
    tensor index k reads from the sender with index k modulo the sender's tensor degree: a whole copy or, where
    boundaries are split (`gathers` are given), its part, which the group then gathers.
    """
    whole_bytes = row_bytes
    row_bytes = row_bytes if gathers is None else row_bytes / receivers.tensor
    pairs = list(overlaps(senders, receivers))
    alike = Counter((senders.replicas[a], receivers.replicas[b], rows) for a, b, rows in pairs)
    edges = {
        key: Counter((key[0][index % senders.tensor], target) for index, target in enumerate(key[1])) for key in alike
    }
    messages = {
        key: Counter({(*edge, key[2] * row_bytes): uses for edge, uses in used.items()}) for key, used in edges.items()
    }
    latencies = {
        key: max(fabric.link(edge)[0] for edge in used)
        + (0.0 if gathers is None else gathers.all_reduce((key[1],)).gather_seconds(key[2] * whole_bytes))
        for key, used in edges.items()
    }
    work = {key: _work(own, fabric) for key, own in messages.items()}
    departures = (
        _in_turn(alike, messages, work, fabric) if fabric.queues_messages else _at_once(alike, messages, fabric)
    )
    found = []
    for a, b, rows in pairs:
        key = senders.replicas[a], receivers.replicas[b], rows
        drain, queues = departures[key]
        found.append(Piece(a, b, drain, latencies[key], queues))
    load = Load()
    for key, times in alike.items():
        for card, seconds in work[key].items():
            load[card] += times * seconds
    return Boundary(tuple(found), load)


def _at_once(alike: Mapping[_Kind, int], messages: Mapping[_Kind, Counter[Message]], fabric: Fabric) -> _Departures:
    """All pieces leave together and share the cards."""
    every: Counter[Message] = Counter()
    for key, times in alike.items():
        for message, uses in messages[key].items():
            every[message] += times * uses
    seconds = fabric.seconds_at_once(every)
    return {key: (max(seconds[message] for message in own), ()) for key, own in messages.items()}


def _in_turn(
    alike: Mapping[_Kind, int],
    messages: Mapping[_Kind, Counter[Message]],
    work: Mapping[_Kind, Mapping[Card, float]],
    fabric: Fabric,
) -> _Departures:
    """Every piece by itself, behind those that are before it on a card."""
    holders: Counter[Card] = Counter()
    for key, times in alike.items():
        holders.update(dict.fromkeys(work[key], times))
    found = {}
    for key, own in messages.items():
        seconds = fabric.seconds_at_once(own)
        shared = tuple((card, busy) for card, busy in work[key].items() if holders[card] > 1)
        found[key] = max(seconds.values()), shared
    return found


def _work(messages: Mapping[Message, int], fabric: Fabric) -> dict[Card, float]:
    """Seconds for which messages keep each card busy."""
    load: defaultdict[Edge, float] = defaultdict(float)
    for (source, target, size), uses in messages.items():
        load[source, target] += uses * size
    return fabric.card_seconds(fabric.load(load))


def missing_rows(old: Seats, new: Seats) -> Iterator[tuple[int, int, int]]:
    """(device, device that sends, rows): what each device of a stage lacks when its layers are arranged anew.

    A device keeps the rows it has and gets the others from a rank that has them: one on its own node where there is
    one, else the rank whose tensor index is its own modulo the old degree (Galvatron's Slice-Gather).
    """
    holders: list[list[int]] = [[0] * old.tensor for _ in range(old.data)]
    for index in range(len(old.nodes)):
        replica, tensor = old.place(index)
        holders[replica][tensor] = index
    senders: dict[int, list[tuple[int, int]]] = {}
    for sender, receiver, rows in overlaps(old, new):
        senders.setdefault(receiver, []).append((sender, rows))
    for index, node in enumerate(new.nodes):
        had, _ = old.place(index)
        replica, tensor = new.place(index)
        for sender, rows in senders[replica]:
            if sender != had:
                near = [holder for holder in holders[sender] if old.nodes[holder] == node]
                yield index, near[tensor % len(near)] if near else holders[sender][tensor % old.tensor], rows


def redistribution_seconds(old: Seats, new: Seats, row_bytes: float, fabric: Fabric) -> float:
    """R(L, S_i, S_j): seconds until every device has the rows that it computes next, all messages at once.

    Between nodes they share the cards; inside a node all that a device sends, or gets, goes through its own port.
    """
    messages: Counter[Message] = Counter()
    ports: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    for target, source, rows in missing_rows(old, new):
        edge = old.nodes[source], new.nodes[target]
        messages[*edge, rows * row_bytes] += 1
        if edge[0] == edge[1]:
            seconds = rows * row_bytes / fabric.flow(edge)
            ports["out", source, edge[0]] += seconds
            ports["in", target, edge[1]] += seconds
    alone = fabric.seconds_at_once(messages)
    at_once = max((spent + fabric.link((a, b))[0] for (a, b, _), spent in alone.items()), default=0.0)
    through = max((busy + fabric.link((node, node))[0] for (_, _, node), busy in ports.items()), default=0.0)
    return max(at_once, through)
