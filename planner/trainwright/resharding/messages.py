"""Who sends what to whom: the document that a worker can run, and what its messages cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainwright.cluster import Device
from trainwright.cost.collectives import Collectives
from trainwright.cost.fabric import Card, Edge, Fabric, Message
from trainwright.resharding.boxes import Box, elements


class Delivery(StrEnum):
    """How slices reach the replicas of a target tile.

    DIRECT: every device is sent all that it lacks (Alpa's Fig. 6b). GATHERED: a node is sent each slice once, spread over its
    replicas, which gather it inside the node (Fig. 6c, the local all-gather). RELAYED: of the replicas on several nodes
    each node is sent a part, the nodes exchange the parts, and gather inside.
    """

    DIRECT = "direct"
    GATHERED = "gathered"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class Send:
    """One message.

    Attributes:
        slice: by dimension of the tensor, the first index and the index behind the last.
    """

    source: Device
    target: Device
    slice: Box


@dataclass(frozen=True, slots=True)
class Part:
    """What one member brings to a gather: slices that it holds by then, maybe none."""

    device: Device
    slices: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather: afterwards every member holds the slices of all."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Messages and gathers that start at once, out of what the devices hold when it begins.

    Several messages from one device to the same other one are matched in the order of the list.
    """

    sends: tuple[Send, ...] = ()
    gathers: tuple[Gather, ...] = ()


@dataclass(frozen=True)
class MessagePlan:
    """How a tensor comes from one sharding into another; a round begins when the one before it is done.

    What a device holds already it keeps: no message brings it.
    """

    shape: tuple[int, ...]
    bytes_per_element: int
    delivery: Delivery
    rounds: tuple[Round, ...]

    def node_bytes(self) -> Counter[Edge]:
        """Bytes from node to node by messages; gathers stay inside the nodes."""
        found: Counter[Edge] = Counter()
        for one in self.rounds:
            for send in one.sends:
                found[send.source.node, send.target.node] += elements(send.slice) * self.bytes_per_element
        return found

    def crossing_bytes(self) -> int:
        """Bytes that leave a node for another."""
        return sum(count for (source, target), count in self.node_bytes().items() if source != target)

    def sent_bytes(self) -> Counter[Device]:
        """By device: bytes that it sends to other nodes."""
        found: Counter[Device] = Counter()
        for one in self.rounds:
            for send in one.sends:
                if send.source.node != send.target.node:
                    found[send.source] += elements(send.slice) * self.bytes_per_element
        return found

    def card_seconds(self, fabric: Fabric) -> Mapping[Card, float]:
        """For how many seconds its messages keep every network card busy."""
        return fabric.card_seconds(fabric.load(self.node_bytes()))

    def seconds(self, fabric: Fabric) -> float:
        """Seconds until every target device holds its tile, while nothing else runs.

        Messages of a round share the cards and links (`Fabric.seconds_at_once`); rounds and gathers do not overlap, as
        they could in part if slices were cut finer.
        """
        return sum(self._round_seconds(one, fabric) for one in self.rounds)

    def _round_seconds(self, one: Round, fabric: Fabric) -> float:
        messages: Counter[Message] = Counter(
            (send.source.node, send.target.node, float(elements(send.slice) * self.bytes_per_element))
            for send in one.sends
        )
        spent = fabric.seconds_at_once(messages)
        sent = max((seconds + fabric.link((a, b))[0] for (a, b, _), seconds in spent.items()), default=0.0)
        gathers = {
            (
                tuple(part.device.node for part in gather.parts),
                max(sum(elements(box) for box in part.slices) for part in gather.parts),
            )
            for gather in one.gathers
        }
        collectives = Collectives(fabric)
        # A ring takes as long as if every member brought as much as the one with the most.
        gathered = (
            collectives.all_reduce((nodes,)).gather_seconds(most * len(nodes) * self.bytes_per_element)
            for nodes, most in gathers
        )
        return max(sent, *gathered) if gathers else sent
