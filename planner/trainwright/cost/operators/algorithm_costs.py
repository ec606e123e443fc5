"""Costs of a layer's parallel algorithms on one mesh: operator seconds, communication, weight state and activations.

The paper rewrites chosen all-reduces into a reduce-scatter and an all-gather (§4.2): the same bytes travel, and in
between each device has only its shard of the sum. For gradients, each replica updates only its shard of the weight and
keeps only that shard's optimizer state, as ZeRO does. For activations, the trivial operators after a sum (residual,
dropout, normalisation) compute and keep only a shard, which Megatron calls sequence parallelism. The rewriting never
costs anything, so the integer program counts its savings in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trainwright.cluster import EMULATED_PREFIX
from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import StateBytes, state_bytes
from trainwright.cost.operators.integer_program import EdgeCosts, IntegerProgram, NodeChoices
from trainwright.cost.operators.operator_graph import GraphNode, Read
from trainwright.cost.operators.parallel_algorithms import GraphAlgorithms, OperatorAlgorithms
from trainwright.cost.operators.sharding_specs import (
    Indices,
    LinearSeconds,
    LogicalMesh,
    Resharding,
    all_gathers,
    all_reduce,
    device_shares,
    reduce_scatter,
)
from trainwright.layer import FLOPS_PER_BYTE, Dtype, LayerKind, TensorSplit
from trainwright.loop_nests.operations import Operation
from trainwright.operator_shardings import Loop, LoopMapping
from trainwright.profiles import LayerCost
from trainwright.strategy import Sharding


@dataclass
class LayerCompute:
    """Compute seconds of one layer kind on a mesh's accelerators, of which the slowest counts."""

    context: CostContext
    kind: LayerKind
    operations: Sequence[Operation]
    accelerators: tuple[str, ...]
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    _weights: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def seconds(self, index: int, rows: int, parts: int) -> float:
        """Return forward and backward seconds of an operator over `rows` rows on a device with one of `parts` parts.

        The profile at that tensor degree is used if the operator is sharded by it and it exists, else the least
        profiled degree.
        """
        if self._takes_products_alone:
            degree = parts if self._is_profiled(parts) else self.min_profiled_degree
            return self.layer_seconds(rows, degree) * self.kind.flops_shares[index] * degree / parts
        splits = self.kind.is_tensor_parallel and bool(self.operations[index].tensor_parallel_loops)
        degree = parts if splits and self._is_profiled(parts) else self.min_profiled_degree
        shares = self._shares(rows, degree)
        divided = degree if self.operations[index].tensor_parallel_loops else 1
        return self.layer_seconds(rows, degree) * shares[index] * divided / parts

    @cached_property
    def _takes_products_alone(self) -> bool:
        """Is True on emulated devices: operators take the time of their share of the layer's FLOPs, however they are divided."""
        return all(name.startswith(EMULATED_PREFIX) for name in self.accelerators)

    def update_seconds_per_value(self) -> float:
        """Return seconds of the optimizer step per parameter of the layer."""
        degree = self.min_profiled_degree
        values = max(self.context.divided_at(degree).parameters(self.kind), 1)
        return max(self._cost(name, degree, 1).update_seconds for name in self.accelerators) / values

    def forward_share(self, rows: int) -> float:
        """Return the forward's fraction of the layer's seconds, on the slowest accelerator."""
        costs = [self._cost(name, self.min_profiled_degree, rows) for name in self.accelerators]
        slowest = max(costs, key=lambda cost: cost.forward_seconds + cost.backward_seconds)
        total = slowest.forward_seconds + slowest.backward_seconds
        return slowest.forward_seconds / total if total else 0.5

    def activation_ratio(self, rows: int) -> float:
        """Return profiled over counted bytes that the layer saves for the backward."""
        counted_bytes = self.kind.saved_bytes(self.context.model.dtype, self.min_profiled_degree, rows)
        profiled_bytes = max(
            self._cost(name, self.min_profiled_degree, rows).activation_bytes for name in self.accelerators
        )
        return profiled_bytes / counted_bytes if counted_bytes else 1.0

    @cached_property
    def min_profiled_degree(self) -> int:
        """Return the least tensor degree profiled on all accelerators: 1 unless the layer was too large for one device."""
        if not self.kind.is_tensor_parallel:
            return 1
        profiles = self.context.profiles
        degrees = [set(profiles.tensor_degrees(name, self.kind.name)) for name in self.accelerators]
        return min(set[int].intersection(*degrees), default=1)

    def _cost(self, accelerator: str, degree: int, rows: int) -> LayerCost:
        return self.context.layer_cost(accelerator, self.kind, TensorSplit(degree), rows)

    def _is_profiled(self, degree: int) -> bool:
        return all(self.context.profiles.has(name, self.kind.name, degree) for name in self.accelerators)

    def layer_seconds(self, rows: int, degree: int) -> float:
        """Return forward and backward seconds of the whole layer at a tensor degree."""
        if (rows, degree) not in self._seconds:
            costs = [self._cost(name, degree, rows) for name in self.accelerators]
            self._seconds[rows, degree] = max(cost.forward_seconds + cost.backward_seconds for cost in costs)
        return self._seconds[rows, degree]

    def _shares(self, rows: int, degree: int) -> list[float]:
        """Return each operator's fraction of the layer's seconds at a tensor degree; they add up to 1."""
        if (rows, degree) not in self._weights:
            dtype = self.context.model.dtype
            weights = []
            for operation in self.operations:
                weight_elements = operation.weight.elements if operation.weight is not None else 0.0
                moved = (operation.moved_per_row * rows + weight_elements) * dtype.num_bytes
                weight = max(operation.flops_per_row * rows, moved * FLOPS_PER_BYTE[dtype])
                weights.append(weight / (degree if operation.tensor_parallel_loops else 1))
            total = sum(weights) or 1.0
            self._weights[rows, degree] = [weight / total for weight in weights]
        return self._weights[rows, degree]


@dataclass(frozen=True, slots=True)
class Rewriting:
    """All-reduces that are rewritten as a reduce-scatter and an all-gather.

    Attributes:
        gradients: whether those of gradients are.
        activations: whether those of activations are; our runtime does not, so counting them would promise too much
            memory.
    """

    gradients: bool = True
    activations: bool = False


def scattered_share(sums: Indices, replicas: Array) -> Array:
    """Return `[algorithm]` the fraction of work after an activation sum left for each device, 1 without a sum.

    `sums` are the mesh dimensions over which the leader's output is summed, as bits, and `replicas` the devices for
    each bit mask: without the rewriting, each of them does all of that work.
    """
    left: Array = 1.0 / replicas[sums]
    return left


_BITS: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (0, 1))


@dataclass(frozen=True)
class MeshCosts:
    """Communication costs of a mesh.

    Attributes:
        rewriting: all-reduces that become a reduce-scatter and an all-gather (paper §4.2).
    """

    mesh: LogicalMesh
    context: CostContext
    rewriting: Rewriting = field(default_factory=Rewriting)

    def sharding(self, weight_mode: int) -> Sharding:
        """Return what replicas shard of a weight that is held whole (mode 0), or gathered before every use (mode 1)."""
        return Sharding.ZERO3 if weight_mode else Sharding.ZERO2 if self.rewriting.gradients else Sharding.NONE

    @cached_property
    def resharding(self) -> Resharding:
        return Resharding(self.mesh)

    @cached_property
    def shares(self) -> Array:
        """Return `[layout]` the fraction of a tensor on one device."""
        return device_shares(self.mesh.shape)

    @cached_property
    def replica_counts(self) -> Array:
        """Return `[dimensions as bits]` how many devices take part in a sum."""
        first, second = self.mesh.shape
        return np.array([1.0, first, second, first * second])

    def all_reduce(self, sums: Indices, size_bytes: Array) -> Array:
        """Return `[algorithm]` seconds to all-reduce `size_bytes` over the dimensions in `sums`."""
        return self._seconds(self._all_reduces, sums, size_bytes)

    def reduce_scatter(self, sums: Indices, size_bytes: Array) -> Array:
        """Return `[algorithm]` seconds to reduce-scatter `size_bytes` of gradients, whose messages others share."""
        _, per_byte = self._reduce_scatters
        seconds: Array = per_byte[sums] * size_bytes
        return seconds

    def all_gather(self, sums: Indices, size_bytes: Array, *, pays_latency: bool) -> Array:
        """Return `[algorithm]` seconds to all-gather `size_bytes`; latency counts unless others share the messages."""
        fixed, per_byte = self._all_gathers
        return self._seconds((fixed * pays_latency, per_byte), sums, size_bytes)

    @cached_property
    def _all_reduces(self) -> tuple[Array, Array]:
        return self._by_bits(all_reduce)

    @cached_property
    def _reduce_scatters(self) -> tuple[Array, Array]:
        return self._by_bits(reduce_scatter)

    @cached_property
    def _all_gathers(self) -> tuple[Array, Array]:
        return self._by_bits(all_gathers)

    def _by_bits(self, collective: Callable[[LogicalMesh, tuple[int, ...]], LinearSeconds]) -> tuple[Array, Array]:
        seconds = [collective(self.mesh, dimensions) for dimensions in _BITS]
        return np.array([line.fixed_seconds for line in seconds]), np.array([line.seconds_per_byte for line in seconds])

    @staticmethod
    def _seconds(prices: tuple[Array, Array], sums: Indices, size_bytes: Array) -> Array:
        fixed, per_byte = prices
        return fixed[sums] + per_byte[sums] * size_bytes


@dataclass(frozen=True)
class WeightCosts:
    """Costs of one weight, held in either weight mode.

    In mode 0, gradients are reduce-scattered, then gradients (or, rewritten, updated weights) are all-gathered. In mode 1
    the weight itself stays sharded and is gathered twice per micro-batch instead.

    Attributes:
        values: `[algorithm]` parameters on a device.
        sums: `[algorithm]` the mesh dimensions over which its gradient is summed, as bits.
        pays_latency: whether its gathers are messages of their own.
    """

    prices: MeshCosts
    compute: LayerCompute
    values: Array
    sums: Indices
    pays_latency: bool

    def terms(self) -> Array:
        """Return `[cost term, weight mode, algorithm]` costs, with terms ordered as in `NodeChoices`."""
        costs = np.zeros((4, 2, len(self.values)))
        costs[0, 1] = 2 * self.gather_seconds
        for mode in (0, 1):
            costs[1, mode] = self.reduce_seconds(mode) + self.publish_seconds(mode) + self.update_seconds(mode)
            costs[2, mode] = self.state(mode).total
        return costs

    @cached_property
    def gather_seconds(self) -> Array:
        """Return `[algorithm]` seconds to gather the weight before a use, in mode 1."""
        size = self.values * self.prices.context.value_bytes.weight
        return self.prices.all_gather(self.sums, size, pays_latency=self.pays_latency)

    def reduce_seconds(self, mode: int) -> Array:
        """Return `[algorithm]` seconds to reduce its gradient: reduce-scattered, and gathered again if replicas share no update."""
        size = self.values * self.prices.context.value_bytes.gradient
        scattered = self.prices.reduce_scatter(self.sums, size)
        if self.prices.sharding(mode) is Sharding.NONE:
            scattered = scattered + self.prices.all_gather(self.sums, size, pays_latency=False)
        return scattered

    def publish_seconds(self, mode: int) -> Array:
        """Return `[algorithm]` seconds to gather the weight once its shards are updated, if it is used whole (mode 0)."""
        if self.prices.sharding(mode) is not Sharding.ZERO2:
            return np.zeros(len(self.values))
        size = self.values * self.prices.context.value_bytes.weight
        return self.prices.all_gather(self.sums, size, pays_latency=False)

    def update_seconds(self, mode: int) -> Array:
        """Return `[algorithm]` seconds of the optimizer step."""
        seconds: Array = self.compute.update_seconds_per_value() * self.updated_values(mode)
        return seconds

    def updated_values(self, mode: int) -> Array:
        """Return `[algorithm]` the parameters that a device updates."""
        return self.values if self.prices.sharding(mode) is Sharding.NONE else self._shard

    def state(self, mode: int) -> StateBytes[Array]:
        """Return `[algorithm]` the bytes of training state."""
        return state_bytes(self.values, self._shard, self.prices.sharding(mode), self.prices.context.value_bytes)

    @property
    def _shard(self) -> Array:
        shard: Array = self.values / self.prices.replica_counts[self.sums]
        return shard


@dataclass
class LayerIlpCosts:
    """Costs of one layer's integer program on a mesh, for a number of rows over the whole mesh."""

    mesh_costs: MeshCosts
    algorithms: GraphAlgorithms
    compute: LayerCompute
    rows: int

    def programme(self) -> IntegerProgram:
        """Build Eq. 1: c of compute, d of communication, R of resharding, and the bytes of each choice."""
        graph = self.algorithms.graph
        inside = [np.zeros(count) for count in self.algorithms.counts]
        edges: dict[tuple[int, int], Array] = {}
        for read in graph.operand_edges:
            source, target = graph.node_of[read.source], graph.node_of[read.operation]
            source_layouts, algorithms = (
                self.algorithms.output_layouts(read.source),
                self.algorithms.operators[read.operation],
            )
            size = self.read_bytes(read)
            layouts = algorithms.operand_layouts[read.operand]
            if source == target:
                inside[source] += self.mesh_costs.resharding.seconds(source_layouts, layouts, size)
            else:
                seconds = self.mesh_costs.resharding.seconds(source_layouts[:, None], layouts[None, :], size)
                edges[source, target] = edges.get((source, target), 0.0) + seconds
        nodes = tuple(self._choices(number, extra) for number, extra in enumerate(inside))
        return IntegerProgram(
            nodes, tuple(EdgeCosts(source, target, costs) for (source, target), costs in edges.items())
        )

    def costs_of_weight(self, values: int) -> tuple[int, Array] | None:
        """Return the node of the weight with `values` parameters, and its iteration seconds and state bytes."""
        index = self.operator_with_weight(values)
        return None if index is None else (self.algorithms.graph.node_of[index], self.weight(index).terms()[1:3])

    def operator_with_weight(self, values: int) -> int | None:
        """Return the operator whose weight has `values` parameters, or a few more for its bias; None if there is none."""
        weights = {i: each.weight for i, each in enumerate(self.algorithms.graph.operations) if each.weight is not None}
        sizes = {i: weight.elements for i, weight in weights.items() if weight.elements >= values}
        return min(sizes, key=sizes.__getitem__, default=None)

    def compute_seconds(self, number: int) -> Array:
        """Return `[algorithm]` the part of a node's seconds that its operators compute."""
        node = self.algorithms.graph.nodes[number]
        seconds: Array = np.zeros(self.algorithms.counts[number])
        for index in node.operations:
            share = 1.0 if index == node.leader else self._scattered_share(node)
            seconds += self._compute_seconds(index, self.algorithms.operators[index]) * share
        return seconds

    def weight(self, index: int) -> WeightCosts:
        """Return the costs of an operator's weight."""
        operation, algorithms = self.algorithms.graph.operations[index], self.algorithms.operators[index]
        assert operation.weight is not None
        assert algorithms.weight_layouts is not None
        assert algorithms.weight_sums is not None
        values = self.mesh_costs.shares[algorithms.weight_layouts] * operation.weight.elements
        return WeightCosts(self.mesh_costs, self.compute, values, algorithms.weight_sums, not operation.is_trivial)

    @cached_property
    def _unit_bytes(self) -> int:
        """Return bytes of one value over all rows."""
        return self.rows * self.mesh_costs.context.value_bytes.weight

    @cached_property
    def _activation_ratio(self) -> float:
        return self.compute.activation_ratio(self.rows)

    def _choices(self, number: int, extra: Array) -> NodeChoices:
        costs = np.zeros((4, 2, self.algorithms.counts[number]))
        costs[0] += extra
        gathers = np.zeros(self.algorithms.counts[number])
        node = self.algorithms.graph.nodes[number]
        scattered = self._scattered_share(node)
        for index in node.operations:
            operation, algorithms = self.algorithms.graph.operations[index], self.algorithms.operators[index]
            share = 1.0 if index == node.leader else scattered
            costs[0] += self._compute_seconds(index, algorithms) * share + sum(self.sum_seconds(index))
            costs[3] += self._activation_bytes(operation, algorithms) * share
            if operation.weight is not None:
                weight = self.weight(index)
                costs += weight.terms()
                gathers = np.maximum(gathers, weight.sums)
        costs[0, 1, gathers == 0] = np.inf
        return NodeChoices(costs[0], costs[1], costs[2], costs[3])

    def _scattered_share(self, node: GraphNode) -> Array | float:
        """Return the fraction of the followers' work left for a device if the leader's sum ends in a reduce-scatter."""
        if node.leader is None or not self.mesh_costs.rewriting.activations:
            return 1.0
        return scattered_share(self.algorithms.operators[node.leader].output_sums, self.mesh_costs.replica_counts)

    def _compute_seconds(self, index: int, algorithms: OperatorAlgorithms) -> Array:
        seconds = {mapping: self._mapped_seconds(index, mapping) for mapping in set(algorithms.mappings)}
        return np.array([seconds[mapping] for mapping in algorithms.mappings])

    def _mapped_seconds(self, index: int, mapping: LoopMapping) -> float:
        rows, parts = self.rows, 1
        for size, loop in zip(self.mesh_costs.mesh.shape, mapping, strict=True):
            if loop is Loop.BATCH:
                rows //= size
            elif loop is not None:
                parts *= size
        return self.compute.seconds(index, rows, parts)

    def sum_seconds(self, index: int) -> tuple[Array, Array]:
        """Return `[algorithm]` seconds of an operator's all-reduces of one micro-batch, forward and backward.

        Partial outputs are summed forward, partial gradients of operands backward, and sums of its own both ways.
        """
        operation, algorithms = self.algorithms.graph.operations[index], self.algorithms.operators[index]
        prices, size = self.mesh_costs, self._unit_bytes
        outputs = prices.shares[algorithms.output_layouts] * operation.output.elements * size
        forward, backward = prices.all_reduce(algorithms.output_sums, outputs), np.zeros(len(outputs))
        for operand, layouts, sums in zip(
            operation.operands, algorithms.operand_layouts, algorithms.operand_sums, strict=True
        ):
            backward = backward + prices.all_reduce(sums, prices.shares[layouts] * operand.elements * size)
        if (
            operation.internal_sums is not None
            and algorithms.internal_layouts is not None
            and algorithms.internal_sums is not None
        ):
            own = prices.shares[algorithms.internal_layouts] * operation.internal_sums[0].elements * self.rows * 4
            each = prices.all_reduce(algorithms.internal_sums, own)
            forward, backward = forward + each, backward + each
        return forward, backward

    def read_bytes(self, read: Read) -> float:
        """Return the bytes of the whole tensor that an operator reads."""
        return self.algorithms.graph.operations[read.operation].operands[read.operand].elements * self._unit_bytes

    def _activation_bytes(self, operation: Operation, algorithms: OperatorAlgorithms) -> Array:
        layouts = algorithms.operand_layouts[0] if algorithms.operand_layouts else algorithms.output_layouts
        is_float32 = self.mesh_costs.context.model.dtype is Dtype.FLOAT32
        saved = operation.saved_bytes_per_row if is_float32 else operation.half_saved_bytes_per_row
        return self.mesh_costs.shares[layouts] * (self.rows * saved) * self._activation_ratio
