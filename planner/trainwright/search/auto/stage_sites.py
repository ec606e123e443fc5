"""Sites of stages on a line of devices: tensor groups, rings, and links between stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.boundary_terms import boundary_terms
from trainwright.cost.collectives import ring_bytes_ratio
from trainwright.cost.layer_sums import Array
from trainwright.cost.network import Network
from trainwright.cost.time_terms import TensorGroupClass
from trainwright.runtime import IDEAL_RINGS
from trainwright.search.auto.device_lines import DeviceLine
from trainwright.search.auto.replica_sets import ReplicaSet, Rings
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.degrees import is_profiled, tensor_degrees


@dataclass(frozen=True, slots=True)
class LineInterval:
    """Stage on blocks [first_block, end_block) with layers between cuts [first, end)."""

    first_block: int
    end_block: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StageSite:
    """Replica sets, one per tensor degree, and node count of consecutive blocks."""

    replica_sets: tuple[ReplicaSet, ...]
    node_count: int


@dataclass
class _RingBuilder:
    """Incremental builder of `Rings` over consecutive nodes."""

    bandwidth: Array
    network: Network
    names: Sequence[str]
    _nodes: dict[int, None] = field(default_factory=dict)
    _first: int = -1
    _last: int = -1
    _intra_node_bandwidth: float = np.inf
    _inter_node_bandwidth: float = np.inf
    _single_ring_bandwidth: float = np.inf

    def add_nodes(self, nodes: Iterable[int]) -> None:
        """Append nodes by number, ignoring those already present."""
        for node in nodes:
            if node not in self._nodes:
                self._nodes[node] = None
                self._intra_node_bandwidth = min(self._intra_node_bandwidth, float(self.bandwidth[node, node]))
                if self._last >= 0:
                    between, flow = self._hop_bandwidths(self._last, node)
                    self._inter_node_bandwidth, self._single_ring_bandwidth = (
                        min(self._inter_node_bandwidth, between),
                        min(self._single_ring_bandwidth, flow),
                    )
                else:
                    self._first = node
                self._last = node

    def rings_over(self, device_count: int) -> Rings:
        """Return the rings of `device_count` devices on the added nodes."""
        count = len(self._nodes)
        members = max(device_count // count, 1)
        between = single_ring = np.inf
        if count > 1:
            between, single_ring = self._hop_bandwidths(self._last, self._first)
            between, single_ring = (
                min(self._inter_node_bandwidth, between),
                min(self._single_ring_bandwidth, single_ring),
            )
        return Rings(count, members, self._intra_node_bandwidth if members > 1 else np.inf, between, single_ring)

    def _hop_bandwidths(self, here: int, there: int) -> tuple[float, float]:
        bandwidth = max(float(self.bandwidth[here, there]), float(self.bandwidth[there, here]))
        return bandwidth, self.network.flow_bytes_per_second((self.names[here], self.names[there]))


@dataclass
class StageSites:
    """Sites of one line, independent of rows.

    Attributes:
        max_tensor_degree: largest tensor group that may span nodes.
    """

    replica_tables: ReplicaTables
    line: DeviceLine
    max_tensor_degree: int = 0
    _groups_by_degree: dict[int, list[TensorGroupClass]] = field(default_factory=dict)
    """[tensor degree]: class of the tensor group that starts at each device of the line."""

    @cached_property
    def open_tensor_degrees(self) -> tuple[int, ...]:
        """Return tensor degrees that the limits and profiles allow."""
        problem = self.replica_tables.problem
        largest = max(
            self.max_tensor_degree, *(problem.cluster.node(device.node).devices for device in self.line.devices)
        )
        max_degree = problem.limits.max_tensor(largest)
        powers = [2**power for power in range(max_degree.bit_length()) if 2**power <= max_degree]
        degrees = sorted(
            {degree for size in {*powers, max_degree} for degree in tensor_degrees(problem.model, size, max_degree)}
        )
        names = tuple(dict.fromkeys(problem.cluster.node(device.node).accelerator for device in self.line.devices))
        return tuple(degree for degree in degrees if is_profiled(problem.model, problem.profiles, names, degree))

    @cached_property
    def site_numbers(self) -> NDArray[np.intp]:
        """Return [first block, end block] indices into `sites`; -1 where there is none."""
        return self._numbered_sites[0]

    @cached_property
    def sites(self) -> list[StageSite]:
        """Return the sites with replica sets."""
        return self._numbered_sites[1]

    @cached_property
    def _numbered_sites(self) -> tuple[NDArray[np.intp], list[StageSite]]:
        number_of: dict[StageSite, int] = {}
        blocks = self.line.blocks
        table = np.full((blocks + 1, blocks + 1), -1, dtype=np.intp)
        for first in range(blocks):
            for end, site in enumerate(self._sites_from(first), start=first + 1):
                if site.replica_sets:
                    table[first, end] = number_of.setdefault(site, len(number_of))
        return table, list(number_of)

    @property
    def replica_sets(self) -> dict[ReplicaSet, None]:
        """Return the distinct replica sets of all sites."""
        return dict.fromkeys(replica_set for site in self.sites for replica_set in site.replica_sets)

    def _sites_from(self, first: int) -> Iterator[StageSite]:
        """Yield the sites that start at block `first`, each one block longer."""
        nodes_of, ratios = self.replica_tables.nodes_of_group, self.replica_tables.problem.runtime.collective_ratios
        start = self.line.block_bounds[first]
        rings = _RingBuilder(self._bandwidth, self.replica_tables.problem.cost_context.network, self._names)
        counts = {tensor: Counter[TensorGroupClass]() for tensor in self.open_tensor_degrees}
        counted_until = dict.fromkeys(self.open_tensor_degrees, start)
        for block in range(first, self.line.blocks):
            end = self.line.block_bounds[block + 1]
            rings.add_nodes(self._nodes_of_blocks[block])
            ring = rings.rings_over(end - start)
            replica_sets = []
            for tensor in self.open_tensor_degrees:
                if (end - start) % tensor == 0:
                    counts[tensor].update(self._groups_by_start(tensor)[counted_until[tensor] : end : tensor])
                    counted_until[tensor] = end
                    seconds = ring.seconds_per_byte(tensor, end - start)
                    in_order = sorted(
                        counts[tensor].items(), key=lambda item: (item[0].accelerators, nodes_of[item[0]])
                    )
                    replica_sets.append(
                        self.replica_tables.replica_set(
                            tuple(in_order), seconds, ratios if ring.node_count > 1 else IDEAL_RINGS
                        )
                    )
            yield StageSite(tuple(replica_sets), ring.node_count)

    def tensor_groups_of(self, first: int, end: int, tensor: int) -> list[TensorGroupClass]:
        """Return a stage's groups by replica; the degree must divide its devices."""
        return self._groups_by_start(tensor)[self.line.block_bounds[first] : self.line.block_bounds[end] : tensor]

    def _groups_by_start(self, tensor: int) -> list[TensorGroupClass]:
        if tensor not in self._groups_by_degree:
            starts = range(len(self._nodes) - tensor + 1)
            self._groups_by_degree[tensor] = [self._group(start, tensor) for start in starts]
        return self._groups_by_degree[tensor]

    def _group(self, start: int, tensor: int) -> TensorGroupClass:
        nodes = self._nodes[start : start + tensor]
        if len(set(nodes)) == 1:
            # Nodes of one kind are interchangeable, so tensor groups inside them share a class.
            nodes = (self._first_of_kind[self.line.kind_numbers[start]],) * tensor
        return self.replica_tables.tensor_group(nodes)

    @cached_property
    def _nodes(self) -> tuple[str, ...]:
        return tuple(device.node for device in self.line.devices)

    @cached_property
    def _first_of_kind(self) -> dict[int, str]:
        first_of_kind: dict[int, str] = {}
        for node, kind in zip(self._nodes, self.line.kind_numbers, strict=True):
            first_of_kind.setdefault(kind, node)
        return first_of_kind

    @cached_property
    def _nodes_of_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Return each block's distinct node numbers."""
        return tuple(tuple(dict.fromkeys(self._node_numbers[a:z])) for a, z in pairwise(self.line.block_bounds))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.replica_tables.problem.cluster.nodes)

    @cached_property
    def _bandwidth(self) -> Array:
        """Return [source, target] achievable bytes per second between nodes."""
        problem = self.replica_tables.problem
        reached: Array = problem.cost_context.link_matrices.bandwidth * problem.runtime.link_ratio
        return reached

    @cached_property
    def _node_numbers(self) -> tuple[int, ...]:
        number = self.replica_tables.problem.cost_context.node_numbers
        return tuple(number[node] for node in self._nodes)

    @cached_property
    def boundary_seconds_per_byte(self) -> Array:
        """Return [block] seconds per byte both ways over the link to the previous block; 0 for the first."""
        numbers, starts = np.array(self._node_numbers), np.array(self.line.block_bounds[1:-1], dtype=np.intp)
        terms = boundary_terms(numbers[starts - 1], numbers[starts], self.replica_tables.problem.cost_context)
        return np.concatenate([[0.0], terms.send_seconds_per_byte.sum(axis=0), [0.0]])

    def tied_weight_sync_seconds(self, intervals: Sequence[LineInterval]) -> float:
        """Return approximate seconds to all-reduce gradients of tied weights over their stages."""
        kinds = self.replica_tables.problem.model.kinds
        sizes = {kind.shared_weight: kind.shared_parameters for kind in kinds if kind.shared_weight is not None}
        return sum(self._sync_seconds_of_weight(name, size, intervals) for name, size in sizes.items())

    def _sync_seconds_of_weight(self, name: str, size: int, intervals: Sequence[LineInterval]) -> float:
        context, cuts = self.replica_tables.problem.cost_context, self.replica_tables.cuts
        model = context.model
        layers = [layer for layer in model.owners if model.kind_of(layer).shared_weight == name]
        owners = [
            interval
            for interval in intervals
            if any(cuts[interval.first] <= layer < cuts[interval.end] for layer in layers)
        ]
        if len(owners) < 2:
            return 0.0
        nodes: dict[int, None] = {}
        for section in owners:
            nodes.update(
                dict.fromkeys(
                    self._node_numbers[
                        self.line.block_bounds[section.first_block] : self.line.block_bounds[section.end_block]
                    ]
                )
            )
        used = np.array(list(nodes))
        next_nodes = np.roll(used, -1)
        slowest = np.maximum(self._bandwidth[used, next_nodes], self._bandwidth[next_nodes, used]).min()
        members = max(len(used), 2)
        return size * context.gradient_dtype.num_bytes * ring_bytes_ratio(members) / float(slowest)
