"""What messages between neighbouring stages take for every byte, where those of one boundary share the network cards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.links import Links, links_of
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array


@dataclass(frozen=True, eq=False)
class Crossings:
    """The boundaries of a placement.

    Attributes:
        drain: [direction, boundary, replica] seconds per byte until a replica's message has left (alone, where messages
            queue); directions are forward and backward.
        latency: [direction, boundary, replica] seconds from there until it has arrived.
        busy: [boundary, card] seconds per byte for which the messages both ways keep a card busy.
    """

    drain: Array
    latency: Array
    busy: Array


@dataclass
class Cards:
    """The network cards of a problem's nodes, shared as `cost.fabric` does."""

    problem: Problem

    def crossings(self, nodes: NDArray[np.intp]) -> Crossings:
        """Of the placement whose devices sit on these nodes [stage, replica, tensor rank]."""
        upper, lower = nodes[:-1], nodes[1:]
        ways = [self._way(upper, lower), self._way(lower, upper)]
        busy = ways[0][2] + ways[1][2]
        parts = nodes.shape[2] if self.problem.runtime.splits_boundaries else 1
        return Crossings(
            np.stack([drain for drain, _, _ in ways]) / parts,
            np.stack([latency for _, latency, _ in ways]),
            busy[:, busy.any(axis=0)] / parts,
        )

    def _way(self, source: NDArray[np.intp], target: NDArray[np.intp]) -> tuple[Array, Array, Array]:
        """[boundary, replica] drain and latency, and [boundary, card] of one direction."""
        boundary, replica = np.indices(source.shape)[:2]
        apart = source != target
        out_seconds, in_seconds = self._card_seconds
        # What leaves together: all of a boundary or, where messages queue, a replica's own.
        lots, lot = len(source), boundary
        if self.problem.setting.fabric.queues_messages:
            lots, lot = source.shape[0] * source.shape[1], boundary * source.shape[1] + replica
        leaving = self._counts(lot[apart], source[apart], lots) * out_seconds
        arriving = self._counts(lot[apart], target[apart], lots) * in_seconds
        seconds = 1 / (self._links.bandwidth[source, target] * self.problem.runtime.link_ratio)
        together = np.maximum(leaving[lot, source], arriving[lot, target])
        pairs = np.stack([lot[apart], source[apart], target[apart]])
        if self.problem.cluster.links and pairs.size:
            _, number, uses = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
            by_pair = uses[number.reshape(-1)] * self._pair_seconds[source[apart], target[apart]]
            together[apart] = np.maximum(together[apart], by_pair)
        seconds[apart] = np.maximum(seconds, together)[apart]
        latency = self._links.latency[source, target].max(axis=2)
        busy = np.concatenate([leaving, arriving], axis=1)
        if lots > len(source):
            busy = busy.reshape(len(source), -1, busy.shape[1]).sum(axis=1)
        return seconds.max(axis=2), latency, busy

    def _counts(self, lot: NDArray[np.intp], node: NDArray[np.intp], lots: int) -> NDArray[np.intp]:
        """[lot, node] how often it is named."""
        size = len(self.problem.cluster.nodes)
        return np.bincount(lot * size + node, minlength=lots * size).reshape(lots, size)

    @cached_property
    def _links(self) -> Links:
        return links_of(self.problem.cluster)

    @cached_property
    def _pair_seconds(self) -> Array:
        """[source, target] seconds per byte of links that are given one by one; 0 where none is."""
        number = {node.name: index for index, node in enumerate(self.problem.cluster.nodes)}
        found = np.zeros((len(number), len(number)))
        for link in self.problem.cluster.links:
            achieved = link.bandwidth_bytes_per_second * self.problem.runtime.link_ratio
            found[number[link.source], number[link.target]] = 1 / achieved
        return found

    @cached_property
    def _card_seconds(self) -> tuple[Array, Array]:
        """[node] seconds per byte out of and into it."""
        nodes = self.problem.cluster.nodes
        ports = [0.0 if node.network is None else node.network.bandwidth_bytes_per_second for node in nodes]
        number = {node.name: index for index, node in enumerate(nodes)}
        both = np.array([ports, ports])
        for link in self.problem.cluster.links:
            if link.source != link.target:
                for side, name in enumerate((link.source, link.target)):
                    both[side, number[name]] = max(both[side, number[name]], link.bandwidth_bytes_per_second)
        achieved = np.where(both > 0, both * self.problem.runtime.link_ratio, np.inf)
        return 1 / achieved[0], 1 / achieved[1]
