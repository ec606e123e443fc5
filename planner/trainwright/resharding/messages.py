"""Message plan of a resharding, which a worker can run, and its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainwright.cluster import Device
from trainwright.cost.collectives import Collectives
from trainwright.cost.network import Edge, Message, Network, Nic
from trainwright.document_kind import document
from trainwright.resharding.boxes import Box, elements


class Delivery(StrEnum):
    """Route of slices to the replicas of a target tile.

    DIRECT: every device receives all that it lacks (Alpa's Fig. 6b). GATHERED: a node receives each slice once, spread
    over its replicas, which all-gather it within the node (Fig. 6c, the local all-gather). RELAYED: if several nodes
    have replicas, each receives a part; the nodes exchange the parts, then all-gather within.
    """

    DIRECT = "direct"
    GATHERED = "gathered"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class Send:
    """Message of one slice.

    Attributes:
        slice: first index and stop index of every dimension.
    """

    source: Device
    target: Device
    slice: Box


@dataclass(frozen=True, slots=True)
class Part:
    """Contribution of one member to an all-gather: slices that it holds, possibly none."""

    device: Device
    slices: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """All-gather, after which every member holds the slices of all."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Messages and all-gathers that start together, from what the devices hold when it begins.

    Several messages between the same two devices are matched in the order of the list.
    """

    sends: tuple[Send, ...] = ()
    gathers: tuple[Gather, ...] = ()


@document("MessagePlan")
@dataclass(frozen=True)
class MessagePlan:
    """Rounds of messages that turn one sharding of a tensor into another; a round begins when the previous one ends.

    Messages contain only elements that the receiver lacks.
    """

    shape: tuple[int, ...]
    bytes_per_element: int
    delivery: Delivery
    rounds: tuple[Round, ...]

    def node_bytes(self) -> Counter[Edge]:
        """Sum the bytes of messages from node to node; all-gathers stay within nodes."""
        found: Counter[Edge] = Counter()
        for one in self.rounds:
            for send in one.sends:
                found[send.source.node, send.target.node] += elements(send.slice) * self.bytes_per_element
        return found

    def crossing_bytes(self) -> int:
        """Sum the bytes that cross between nodes."""
        return sum(count for (source, target), count in self.node_bytes().items() if source != target)

    def sent_bytes(self) -> Counter[Device]:
        """Sum by device the bytes that it sends to other nodes."""
        found: Counter[Device] = Counter()
        for one in self.rounds:
            for send in one.sends:
                if send.source.node != send.target.node:
                    found[send.source] += elements(send.slice) * self.bytes_per_element
        return found

    def card_seconds(self, fabric: Network) -> Mapping[Nic, float]:
        """Return the seconds for which the messages occupy each NIC."""
        return fabric.nic_seconds(fabric.load(self.node_bytes()))

    def seconds(self, fabric: Network) -> float:
        """Return seconds until every target device holds its tile, while nothing else runs.

        Messages of a round share NICs and links (`Network.concurrent_send_seconds`); rounds and all-gathers do not
        overlap, although finer slices would allow it in part.
        """
        return sum(self._round_seconds(one, fabric) for one in self.rounds)

    def _round_seconds(self, one: Round, fabric: Network) -> float:
        messages: Counter[Message] = Counter(
            (send.source.node, send.target.node, float(elements(send.slice) * self.bytes_per_element))
            for send in one.sends
        )
        spent = fabric.concurrent_send_seconds(messages)
        sent = max((seconds + fabric.link((a, b))[0] for (a, b, _), seconds in spent.items()), default=0.0)
        gathers = {
            (
                tuple(part.device.node for part in gather.parts),
                max(sum(elements(box) for box in part.slices) for part in gather.parts),
            )
            for gather in one.gathers
        }
        collectives = Collectives(fabric)
        # A ring takes as long as if every member contributed as much as the largest.
        gathered = (
            collectives.all_reduce((nodes,)).all_gather_seconds(most * len(nodes) * self.bytes_per_element)
            for nodes, most in gathers
        )
        return max(sent, *gathered) if gathers else sent
