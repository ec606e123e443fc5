"""Seconds per byte of messages between neighbouring stages that share NICs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.cost.network import LinkMatrices, link_matrices
from trainwright.search.problem import Problem


@dataclass(frozen=True, eq=False)
class Crossings:
    """Boundaries of a placement.

    Attributes:
        send_seconds_per_byte: `[direction, boundary, replica]` seconds per byte until a replica's message has left (under
            FIFO as if sent alone); directions are forward and backward.
        latency_seconds: `[direction, boundary, replica]` seconds from then until it has arrived.
        nic_seconds_per_byte: `[boundary, NIC]` busy seconds per byte, both directions together.
    """

    send_seconds_per_byte: Array
    latency_seconds: Array
    nic_seconds_per_byte: Array


@dataclass
class Cards:
    """NICs of a problem's nodes, shared as in `cost.network`."""

    problem: Problem

    def crossings(self, nodes: NDArray[np.intp]) -> Crossings:
        """Return the boundaries of a placement on `nodes[stage, replica, tensor rank]`."""
        upper, lower = nodes[:-1], nodes[1:]
        directions = [self._one_direction(upper, lower), self._one_direction(lower, upper)]
        busy = directions[0][2] + directions[1][2]
        shards = nodes.shape[2] if self.problem.runtime.splits_boundaries else 1
        return Crossings(
            np.stack([drain for drain, _, _ in directions]) / shards,
            np.stack([latency for _, latency, _ in directions]),
            busy[:, busy.any(axis=0)] / shards,
        )

    def _one_direction(self, source: NDArray[np.intp], target: NDArray[np.intp]) -> tuple[Array, Array, Array]:
        """Return `[boundary, replica]` send seconds and latency, and `[boundary, NIC]` busy seconds, of one direction.

        Seconds are per byte.
        """
        boundary, replica = np.indices(source.shape)[:2]
        is_remote = source != target
        out_seconds, in_seconds = self._nic_seconds
        # Messages of a group leave together: all of a boundary or, under FIFO, those of one replica.
        group_count, group = len(source), boundary
        if self.problem.cost_context.network.is_fifo:
            group_count, group = source.shape[0] * source.shape[1], boundary * source.shape[1] + replica
        egress_seconds = self._message_counts(group[is_remote], source[is_remote], group_count) * out_seconds
        ingress_seconds = self._message_counts(group[is_remote], target[is_remote], group_count) * in_seconds
        seconds = 1 / (self._links.bandwidth[source, target] * self.problem.runtime.link_ratio)
        shared_seconds = np.maximum(egress_seconds[group, source], ingress_seconds[group, target])
        pairs = np.stack([group[is_remote], source[is_remote], target[is_remote]])
        if self.problem.cluster.links and pairs.size:
            _, number, uses = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
            by_pair = uses[number.reshape(-1)] * self._pair_seconds[source[is_remote], target[is_remote]]
            shared_seconds[is_remote] = np.maximum(shared_seconds[is_remote], by_pair)
        seconds[is_remote] = np.maximum(seconds, shared_seconds)[is_remote]
        latency = self._links.latency[source, target].max(axis=2)
        busy = np.concatenate([egress_seconds, ingress_seconds], axis=1)
        if group_count > len(source):
            busy = busy.reshape(len(source), -1, busy.shape[1]).sum(axis=1)
        return seconds.max(axis=2), latency, busy

    def _message_counts(self, group: NDArray[np.intp], node: NDArray[np.intp], group_count: int) -> NDArray[np.intp]:
        """Count the messages of each `[group, node]`."""
        size = len(self.problem.cluster.nodes)
        return np.bincount(group * size + node, minlength=group_count * size).reshape(group_count, size)

    @cached_property
    def _links(self) -> LinkMatrices:
        return link_matrices(self.problem.cluster)

    @cached_property
    def _pair_seconds(self) -> Array:
        """`[source, target]` seconds per byte of listed links; 0 for others."""
        number = {node.name: index for index, node in enumerate(self.problem.cluster.nodes)}
        found = np.zeros((len(number), len(number)))
        for link in self.problem.cluster.links:
            achieved = link.bandwidth_bytes_per_second * self.problem.runtime.link_ratio
            found[number[link.source], number[link.target]] = 1 / achieved
        return found

    @cached_property
    def _nic_seconds(self) -> tuple[Array, Array]:
        """`[node]` seconds per byte, outgoing and incoming."""
        nodes = self.problem.cluster.nodes
        ports = [0.0 if node.network is None else node.network.bandwidth_bytes_per_second for node in nodes]
        number = {node.name: index for index, node in enumerate(nodes)}
        bandwidths = np.array([ports, ports])
        for link in self.problem.cluster.links:
            if link.source != link.target:
                for side, name in enumerate((link.source, link.target)):
                    bandwidths[side, number[name]] = max(
                        bandwidths[side, number[name]], link.bandwidth_bytes_per_second
                    )
        achieved = np.where(bandwidths > 0, bandwidths * self.problem.runtime.link_ratio, np.inf)
        return 1 / achieved[0], 1 / achieved[1]
