"""Rows that move: between neighbouring stages, and inside a stage where its layers are arranged anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trainwright.cost.fabric import Card, Edge, Fabric, Message
from trainwright.cost.layout import Seats, overlaps


class Piece(NamedTuple):
    """What one replica sends another for every micro-batch, in one direction.

    Attributes:
        drain_seconds: until the last byte has left, while all pieces of the boundary leave.
        latency_seconds: from there until it has arrived.
    """

    sender: int
    receiver: int
    drain_seconds: float
    latency_seconds: float


class Boundary(NamedTuple):
    """One boundary in one direction: its pieces, and for how many seconds they keep every network card busy."""

    pieces: tuple[Piece, ...]
    cards: Mapping[Card, float]


def boundary(senders: Seats, receivers: Seats, row_bytes: float, fabric: Fabric, *, is_split: bool = False) -> Boundary:
    """What goes over a boundary for every micro-batch.

    Replicas are alike and send at about the same time, so the pieces of a boundary share the cards. The receiver with
    tensor index k reads from the sender with index k modulo the sender's tensor degree: a whole copy or, where
    boundaries are split, its part, which the group then gathers.
    """
    whole_bytes = row_bytes
    row_bytes = row_bytes / receivers.tensor if is_split else row_bytes
    pairs = list(overlaps(senders, receivers))
    # Pieces between the same nodes are alike: looked at once, however many there are.
    alike = Counter((senders.replicas[a], receivers.replicas[b], rows) for a, b, rows in pairs)
    edges = {
        key: Counter((key[0][index % senders.tensor], target) for index, target in enumerate(key[1])) for key in alike
    }
    messages: Counter[Message] = Counter()
    load: Counter[Edge] = Counter()
    for key, times in alike.items():
        for edge, uses in edges[key].items():
            messages[*edge, key[2] * row_bytes] += times * uses
            load[edge] += times * uses * key[2] * row_bytes  # type: ignore[assignment]  # bytes add up like counts
    seconds = fabric.seconds_at_once(messages)
    durations = {
        key: (
            max(seconds[*edge, key[2] * row_bytes] for edge in used),
            max(fabric.link(edge)[0] for edge in used)
            + (_gather_seconds(key[1], key[2] * whole_bytes, fabric) if is_split else 0.0),
        )
        for key, used in edges.items()
    }
    found = tuple(Piece(a, b, *durations[senders.replicas[a], receivers.replicas[b], rows]) for a, b, rows in pairs)
    return Boundary(found, fabric.card_seconds(fabric.load(load)))


def _gather_seconds(nodes: tuple[str, ...], whole_bytes: float, fabric: Fabric) -> float:
    """An all-gather over a ring of the members on these nodes: n - 1 steps of the n-th part."""
    size = len(nodes)
    if size == 1:
        return 0.0
    steps = [fabric.link(edge) for edge in set(zip(nodes, (*nodes[1:], nodes[0]), strict=True))]
    return (size - 1) * max(alpha + whole_bytes / size / bandwidth for alpha, bandwidth in steps)


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
    """R(L, S_i, S_j): seconds until every device has the rows that it computes next, all messages at once."""
    messages = Counter(
        (old.nodes[source], new.nodes[target], rows * row_bytes) for target, source, rows in missing_rows(old, new)
    )
    seconds = fabric.seconds_at_once(messages)
    return max((spent + fabric.link((a, b))[0] for (a, b, _), spent in seconds.items()), default=0.0)
