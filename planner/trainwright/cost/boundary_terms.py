"""Messages between neighbouring stages as arrays: alone on their links, or sharing NICs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array

Nodes = NDArray[np.intp]
"""Numbers of nodes, in the cluster's order."""


class BoundaryTerms(NamedTuple):
    """Messages between stages; directions are forward and backward.

    Attributes:
        send_seconds_per_byte: `[direction, ...]` seconds per byte until a message has left (under FIFO as if sent alone).
        latency_seconds: `[direction, ...]` seconds from then until it has arrived.
    """

    send_seconds_per_byte: Array
    latency_seconds: Array

    def slowest(self) -> BoundaryTerms:
        """Return the maxima over the last axis: messages that all have to arrive."""
        return BoundaryTerms(self.send_seconds_per_byte.max(axis=-1), self.latency_seconds.max(axis=-1))


def boundary_terms(upper: Nodes, lower: Nodes, context: CostContext) -> BoundaryTerms:
    """Return the terms of messages between the nodes of a stage and those of the next, each alone on its link."""
    return _lone_terms(((upper, lower), (lower, upper)), context)


def _lone_terms(edges: Sequence[tuple[Nodes, Nodes]], context: CostContext) -> BoundaryTerms:
    """Return the terms of messages on edges, `(source, target)` by direction."""
    links = context.link_matrices
    flow = np.stack([links.flow[edge] for edge in edges]) * context.runtime.link_ratio
    return BoundaryTerms(1 / flow, np.stack([links.latency[edge] for edge in edges]))


class PlacedBoundaries(NamedTuple):
    """Boundaries of a placement.

    Attributes:
        terms: `[direction, boundary, replica]`.
        nic_seconds_per_byte: `[boundary, NIC]` busy seconds per byte, both directions together.
    """

    terms: BoundaryTerms
    nic_seconds_per_byte: Array


@dataclass
class SharedNics:
    """NICs of a cluster's nodes, shared as in `cost.network`."""

    context: CostContext

    def boundaries(self, nodes: Nodes, *, is_divided: bool = False) -> PlacedBoundaries:
        """Return the boundaries of a placement on `nodes[stage, replica, tensor rank]`; `is_divided`: along the sequence."""
        upper, lower = nodes[:-1], nodes[1:]
        edges, shares = [], []
        for source, target in ((upper, lower), (lower, upper)):
            senders, share = self._deliveries(source, target, is_divided=is_divided)
            edges.append((senders, target))
            shares.append(share)
        alone = _lone_terms(edges, self.context)
        sends = [
            self._sends(*edge, share, seconds)
            for edge, share, seconds in zip(edges, shares, alone.send_seconds_per_byte, strict=True)
        ]
        busy = sends[0][1] + sends[1][1]
        terms = BoundaryTerms(np.stack([send for send, _ in sends]), alone.latency_seconds)
        return PlacedBoundaries(terms.slowest(), busy)

    def _deliveries(self, source: Nodes, target: Nodes, *, is_divided: bool) -> tuple[Nodes, Array]:
        """Return `[boundary, replica, tensor rank]` the senders' nodes and which share of a boundary they send.

        The rule is that of `rank_layout.deliveries`, for equal degrees.
        """
        if is_divided:
            return source, np.full(target.shape, 1 / target.shape[-1])
        if not self.context.runtime.splits_boundaries or target.shape[-1] == 1:
            return source, np.ones(target.shape)
        is_near = (target[..., :, None] == source[..., None, :]).any(axis=-1)
        on_node = (target[..., :, None] == target[..., None, :]).sum(axis=-1)
        return np.where(is_near, target, source), np.where(is_near, 1.0, 1 / on_node)

    def _sends(self, source: Nodes, target: Nodes, share: Array, seconds: Array) -> tuple[Array, Array]:
        """Return send seconds of one direction and `[boundary, NIC]` busy seconds, per byte of a boundary.

        `share` is how much of a boundary each message carries, `seconds` what a byte takes alone.
        """
        boundary, replica = np.indices(source.shape)[:2]
        is_remote = source != target
        # Messages of a group leave together: all of a boundary or, under FIFO, those of one replica.
        group_count, group = len(source), boundary
        if self.context.network.is_fifo:
            group_count, group = source.shape[0] * source.shape[1], boundary * source.shape[1] + replica
        ends = group[is_remote], source[is_remote], target[is_remote]
        sent = share[is_remote]
        shared_seconds = np.zeros(len(sent))
        # A NIC is shared evenly: a message leaves it once as much of every other one has, as in `Network`.
        for size in np.unique(sent):
            through = self._through(*ends, np.minimum(sent, size), group_count)
            shared_seconds = np.where(sent == size, through, shared_seconds)
        seconds = seconds * share
        seconds[is_remote] = np.maximum(seconds[is_remote], shared_seconds)
        busy = np.concatenate(self._nic_loads(*ends, sent, group_count), axis=1)
        if group_count > len(source):
            busy = busy.reshape(len(source), -1, busy.shape[1]).sum(axis=1)
        return seconds, busy

    def _through(self, group: Nodes, source: Nodes, target: Nodes, sent: Array, group_count: int) -> Array:
        """Return `[message]` seconds per byte until the busiest NIC on its way has carried all messages of its group."""
        egress_seconds, ingress_seconds = self._nic_loads(group, source, target, sent, group_count)
        nic_seconds: Array = np.maximum(egress_seconds[group, source], ingress_seconds[group, target])
        if self.context.cluster.links and len(sent):
            _, number = np.unique(np.stack([group, source, target]), axis=1, return_inverse=True)
            together = np.bincount(number.reshape(-1), weights=sent)[number.reshape(-1)]
            nic_seconds = np.maximum(nic_seconds, together * self._pair_seconds[source, target])
        return nic_seconds

    def _nic_loads(
        self, group: Nodes, source: Nodes, target: Nodes, sent: Array, group_count: int
    ) -> tuple[Array, Array]:
        """Return `[group, node]` busy seconds per byte of outgoing and incoming NICs."""
        size = len(self.context.cluster.nodes)
        out_seconds, in_seconds = (
            np.bincount(group * size + node, weights=sent, minlength=group_count * size).reshape(group_count, size)
            * seconds
            for node, seconds in zip((source, target), self._nic_seconds, strict=True)
        )
        return out_seconds, in_seconds

    @cached_property
    def _pair_seconds(self) -> Array:
        """`[source, target]` seconds per byte of listed links; 0 for others."""
        number = self.context.node_numbers
        pair_seconds = np.zeros((len(number), len(number)))
        for (side, *ends), bandwidth in self.context.network.nic_bandwidths.items():
            if side == "pair":
                pair_seconds[number[ends[0]], number[ends[1]]] = 1 / bandwidth
        return pair_seconds

    @cached_property
    def _nic_seconds(self) -> Array:
        """`[direction, node]` seconds per byte, outgoing and incoming; 0 without a NIC."""
        bandwidths, names = self.context.network.nic_bandwidths, self.context.node_numbers
        return np.array([[1 / bandwidths.get((side, name), np.inf) for name in names] for side in ("out", "in")])
