"""Message plans of one resharding: overlaps of tiles, spread over replicas, with a sender for every slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainwright.cluster import Device
from trainwright.cost.network import Network
from trainwright.resharding.boxes import Box, elements, split_by_weight
from trainwright.resharding.messages import Delivery, Gather, MessagePlan, Part, Round, Send
from trainwright.resharding.senders import Job, sender_shares
from trainwright.resharding.sharded import ShardedTensor, Tile, tile_overlaps

Slices = list[tuple[Box, int]]
"""Boxes, each with the number of its source tile."""
Held = list[tuple[Device, Slices]]
"""Devices of one node, each with the slices that it is sent."""


def _by_node(tile: Tile) -> dict[str, list[Device]]:
    found: dict[str, list[Device]] = {}
    for device in tile.holders:
        found.setdefault(device.node, []).append(device)
    return found


@dataclass
class Deliveries:
    """Resharding of one tensor, and its possible deliveries.

    Slices that a device on the receiver's node has are sent within the node under any delivery. All others cross
    between nodes: to every receiver (DIRECT), or once to every node (GATHERED, RELAYED), the minimum without and with
    relays.
    """

    source: ShardedTensor
    target: ShardedTensor
    fabric: Network
    bytes_per_element: int
    _intra_node_sends: list[Send] = field(default_factory=list)
    _inter_node_slices: dict[int, dict[tuple[str, ...], Slices]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._holders = [_by_node(tile) for tile in self.source.tiles]
        self._receivers = [_by_node(tile) for tile in self.target.tiles]
        for tile, other, box in tile_overlaps(self.source, self.target):
            far = []
            for node, devices in self._receivers[other].items():
                near = self._holders[tile].get(node)
                if near is None:
                    far.append(node)
                else:
                    lacking = [device for device in devices if device not in near]
                    self._intra_node_sends.extend(
                        Send(near[i % len(near)], device, box) for i, device in enumerate(lacking)
                    )
            if far:
                self._inter_node_slices.setdefault(other, {}).setdefault(tuple(far), []).append((box, tile))

    def plan(self, delivery: Delivery) -> MessagePlan:
        """Return the message plan of a delivery."""
        make = {Delivery.DIRECT: self._direct, Delivery.GATHERED: self._gathered, Delivery.RELAYED: self._relayed}
        return MessagePlan(self.source.shape, self.bytes_per_element, delivery, tuple(make[delivery]()))

    def plans(self) -> Iterator[MessagePlan]:
        """Yield the message plans that differ, the simplest first."""
        yield self.plan(Delivery.DIRECT)
        if any(len(self._receivers[tile][node]) > 1 for tile, nodes, _ in self._groups() for node in nodes):
            yield self.plan(Delivery.GATHERED)
        if any(len(nodes) > 1 for _, nodes, _ in self._groups()):
            yield self.plan(Delivery.RELAYED)

    def _groups(self) -> Iterator[tuple[int, tuple[str, ...], Slices]]:
        """Iterate over (target tile, its nodes where nobody holds these slices, slices)."""
        return (
            (tile, nodes, slices) for tile, found in self._inter_node_slices.items() for nodes, slices in found.items()
        )

    def _direct(self) -> Iterator[Round]:
        sent = [
            (device, slices)
            for tile, nodes, slices in self._groups()
            for node in nodes
            for device in self._receivers[tile][node]
        ]
        yield from self._rounds(self._sends(sent))

    def _gathered(self) -> Iterator[Round]:
        groups = [
            self._spread(tile, node, [one for nodes, slices in found.items() if node in nodes for one in slices])
            for tile, found in self._inter_node_slices.items()
            for node in dict.fromkeys(node for nodes in found for node in nodes)
        ]
        sends = self._sends([one for group in groups for one in group])
        yield from self._rounds(sends, gathers=[_gather(group) for group in groups if len(group) > 1])

    def _relayed(self) -> Iterator[Round]:
        first: Held = []
        relays: list[Send] = []
        brought: dict[tuple[int, str], dict[Device, list[Box]]] = {}
        for tile, nodes, slices in self._groups():
            shares = split_by_weight(slices, [1.0] * len(nodes))
            spread = {node: self._spread(tile, node, share) for node, share in zip(nodes, shares, strict=True)}
            first.extend(one for group in spread.values() for one in group)
            for node in nodes:
                parts = brought.setdefault((tile, node), {device: [] for device in self._receivers[tile][node]})
                for device, own in spread[node]:
                    parts[device].extend(box for box, _ in own)
                others = [
                    (box, device) for other in nodes if other != node for device, own in spread[other] for box, _ in own
                ]
                for device, share in zip(parts, split_by_weight(others, [1.0] * len(parts)), strict=True):
                    relays.extend(Send(sender, device, box) for box, sender in share)
                    parts[device].extend(box for box, _ in share)
        gathers = [
            Gather(tuple(Part(device, tuple(boxes)) for device, boxes in parts.items()))
            for parts in brought.values()
            if len(parts) > 1
        ]
        yield from self._rounds(self._sends(first), relays, gathers)

    def _spread(self, tile: int, node: str, slices: Slices) -> Held:
        """Spread slices evenly over the node's replicas of a target tile, each slice once."""
        devices = self._receivers[tile][node]
        return list(zip(devices, split_by_weight(slices, [1.0] * len(devices)), strict=True))

    def _sends(self, sent: Held) -> list[Send]:
        """Choose a sender for every slice, balanced where several can send; slices are cut if that requires it."""
        jobs: dict[tuple[int, str], list[tuple[Box, Device]]] = {}
        for device, slices in sent:
            for box, tile in slices:
                jobs.setdefault((tile, device.node), []).append((box, device))
        holders = [{node: len(found) for node, found in by_node.items()} for by_node in self._holders]
        shares = sender_shares(
            [Job(holders[tile], node, sum(elements(box) for box, _ in boxes)) for (tile, node), boxes in jobs.items()],
            self.fabric,
        )
        lots: dict[tuple[int, str], tuple[dict[str, float], list[tuple[Box, Device]]]] = {}
        for ((tile, node), boxes), share in zip(jobs.items(), shares, strict=True):
            # Where one node holds a tile, its slices for all nodes are laid end to end, so that fewer of them are cut.
            lots.setdefault((tile, node if len(share) > 1 else ""), (share, []))[1].extend(boxes)
        found: list[Send] = []
        turns: Counter[int] = Counter()
        for (tile, _), (share, boxes) in lots.items():
            senders = [
                (device, share[node] / holders[tile][node]) for node in share for device in self._holders[tile][node]
            ]
            # Rotate the first sender, so that the remainders of rounding fall on each in turn.
            turn = turns[tile] % len(senders)
            turns[tile] += 1
            senders = senders[turn:] + senders[:turn]
            for (device, _), part in zip(
                senders, split_by_weight(boxes, [weight for _, weight in senders]), strict=True
            ):
                found.extend(Send(device, receiver, box) for box, receiver in part)
        return found

    def _rounds(
        self, sends: list[Send], relays: list[Send] | None = None, gathers: list[Gather] | None = None
    ) -> Iterator[Round]:
        """Iterate over the rounds that have something to do."""
        rounds = (
            Round(sends=(*self._intra_node_sends, *sends)),
            Round(sends=tuple(relays or ())),
            Round(gathers=tuple(gathers or ())),
        )
        return (one for one in rounds if one.sends or one.gathers)


def _gather(group: Held) -> Gather:
    return Gather(tuple(Part(device, tuple(box for box, _ in slices)) for device, slices in group))
