"""Rows that move: between neighbouring stages, and inside a stage where its layers are arranged anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.cost.fabric import Edge, Fabric
from trainwright.cost.layout import Seats, overlaps


@dataclass(frozen=True, slots=True)
class Piece:
    """What one replica sends another for every micro-batch, in one direction.

    Attributes:
        drain_seconds: until the last byte has left, while all pieces of the boundary leave.
        latency_seconds: from there until it has arrived.
    """

    sender: int
    receiver: int
    drain_seconds: float
    latency_seconds: float


def pieces(
    senders: Seats, receivers: Seats, row_bytes: float, fabric: Fabric
) -> tuple[tuple[Piece, ...], dict[tuple[str, ...], float]]:
    """The pieces of one boundary in one direction, and for how many seconds they keep every network card busy.

    Replicas are alike and send at about the same time, so the pieces of a boundary share the cards. The receiver with
    tensor index k reads from the sender with index k modulo the sender's tensor degree.
    """
    found: list[tuple[int, int, float, dict[Edge, int]]] = []
    messages: list[tuple[str, str, float]] = []
    for sender, receiver, rows in overlaps(senders, receivers):
        edges: dict[Edge, int] = {}
        sources = senders.replicas[sender]
        for index, target in enumerate(receivers.replicas[receiver]):
            source = sources[index % senders.tensor]
            edges[source, target] = edges.get((source, target), 0) + 1
            messages.append((source, target, rows * row_bytes))
        found.append((sender, receiver, rows * row_bytes, edges))
    seconds = fabric.seconds_at_once(messages)
    load: dict[Edge, float] = {}
    for source, target, size in messages:
        if source != target:
            load[source, target] = load.get((source, target), 0.0) + size
    made = tuple(
        Piece(
            sender,
            receiver,
            max(seconds[source, target, size] for source, target in edges),
            max(fabric.link(edge)[0] for edge in edges),
        )
        for sender, receiver, size, edges in found
    )
    return made, fabric.card_seconds(fabric.load(load))


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
    messages = [
        (old.nodes[source], new.nodes[target], rows * row_bytes) for target, source, rows in missing_rows(old, new)
    ]
    seconds = fabric.seconds_at_once(messages)
    return max((spent + fabric.link((a, b))[0] for (a, b, _), spent in seconds.items()), default=0.0)
