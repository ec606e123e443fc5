"""Messages between neighbouring stages as arrays: alone on their links, or sharing NICs."""

from __future__ import annotations

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
    links, edges = context.link_matrices, ((upper, lower), (lower, upper))
    bandwidth = np.stack([links.bandwidth[edge] for edge in edges]) * context.runtime.link_ratio
    return BoundaryTerms(1 / bandwidth, np.stack([links.latency[edge] for edge in edges]))


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

    def boundaries(self, nodes: Nodes) -> PlacedBoundaries:
        """Return the boundaries of a placement on `nodes[stage, replica, tensor rank]`."""
        upper, lower = nodes[:-1], nodes[1:]
        alone = boundary_terms(upper, lower, self.context)
        edges = ((upper, lower), (lower, upper))
        sends = [self._sends(*edge, each) for edge, each in zip(edges, alone.send_seconds_per_byte, strict=True)]
        busy = sends[0][1] + sends[1][1]
        shards = nodes.shape[2] if self.context.runtime.splits_boundaries else 1
        terms = BoundaryTerms(np.stack([send for send, _ in sends]) / shards, alone.latency_seconds)
        return PlacedBoundaries(terms.slowest(), busy[:, busy.any(axis=0)] / shards)

    def _sends(self, source: Nodes, target: Nodes, seconds: Array) -> tuple[Array, Array]:
        """Return send seconds of one direction, given those of lone messages, and `[boundary, NIC]` busy seconds, per byte."""
        boundary, replica = np.indices(source.shape)[:2]
        is_remote = source != target
        out_seconds, in_seconds = self._nic_seconds
        # Messages of a group leave together: all of a boundary or, under FIFO, those of one replica.
        group_count, group = len(source), boundary
        if self.context.network.is_fifo:
            group_count, group = source.shape[0] * source.shape[1], boundary * source.shape[1] + replica
        egress_seconds = self._message_counts(group[is_remote], source[is_remote], group_count) * out_seconds
        ingress_seconds = self._message_counts(group[is_remote], target[is_remote], group_count) * in_seconds
        shared_seconds = np.maximum(egress_seconds[group, source], ingress_seconds[group, target])
        pairs = np.stack([group[is_remote], source[is_remote], target[is_remote]])
        if self.context.cluster.links and pairs.size:
            _, number, uses = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
            by_pair = uses[number.reshape(-1)] * self._pair_seconds[source[is_remote], target[is_remote]]
            shared_seconds[is_remote] = np.maximum(shared_seconds[is_remote], by_pair)
        seconds = np.where(is_remote, np.maximum(seconds, shared_seconds), seconds)
        busy = np.concatenate([egress_seconds, ingress_seconds], axis=1)
        if group_count > len(source):
            busy = busy.reshape(len(source), -1, busy.shape[1]).sum(axis=1)
        return seconds, busy

    def _message_counts(self, group: Nodes, node: Nodes, group_count: int) -> NDArray[np.intp]:
        """Count the messages of each `[group, node]`."""
        size = len(self.context.cluster.nodes)
        return np.bincount(group * size + node, minlength=group_count * size).reshape(group_count, size)

    @cached_property
    def _pair_seconds(self) -> Array:
        """`[source, target]` seconds per byte of listed links; 0 for others."""
        number = self.context.node_numbers
        found = np.zeros((len(number), len(number)))
        for (side, *ends), bandwidth in self.context.network.nic_bandwidths.items():
            if side == "pair":
                found[number[ends[0]], number[ends[1]]] = 1 / bandwidth
        return found

    @cached_property
    def _nic_seconds(self) -> Array:
        """`[direction, node]` seconds per byte, outgoing and incoming; 0 without a NIC."""
        bandwidths, names = self.context.network.nic_bandwidths, self.context.node_numbers
        return np.array([[1 / bandwidths.get((side, name), np.inf) for name in names] for side in ("out", "in")])
