"""From the algorithms of a layer to the costs of its integer programme on one mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.memory import optimizer_bytes
from trainwright.cost.setting import Setting
from trainwright.search.alpa.intra.algorithms import GraphAlgorithms, Mapping, OperatorAlgorithms
from trainwright.search.alpa.intra.compute import LayerCompute
from trainwright.search.alpa.intra.graph import Node
from trainwright.search.alpa.intra.layouts import Resharding, shares
from trainwright.search.alpa.intra.mesh import LogicalMesh, Seconds, all_reduce, reduce_scatter
from trainwright.search.alpa.intra.operation import Loop, Operation
from trainwright.search.alpa.intra.programme import Choices, Edge, Programme
from trainwright.search.alpa.intra.rewriting import Rewriting, ValueBytes, scattered_share, weight_state

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_BITS: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (0, 1))


@dataclass(frozen=True)
class MeshPrices:
    """What moving bytes costs on a mesh, and what values weigh in a setting.

    Attributes:
        rewriting: which all-reduces become a reduce-scatter and an all-gather (paper §4.2).
    """

    mesh: LogicalMesh
    setting: Setting
    rewriting: Rewriting = field(default_factory=Rewriting)

    @cached_property
    def resharding(self) -> Resharding:
        return Resharding(self.mesh)

    @cached_property
    def shares(self) -> Array:
        """[layout]."""
        return shares(self.mesh.shape)

    @cached_property
    def replicas(self) -> Array:
        """[dimensions as bits] how many devices sum among them."""
        first, second = self.mesh.shape
        return np.array([1.0, first, second, first * second])

    @cached_property
    def value_bytes(self) -> ValueBytes:
        setting = self.setting
        update = optimizer_bytes(setting.model, setting.optimizer)
        return ValueBytes(setting.model.dtype.num_bytes, setting.gradient_dtype.num_bytes, update)

    def all_reduce(self, sums: Indices, size_bytes: Array) -> Array:
        """Seconds by [algorithm] to sum so many bytes over those dimensions."""
        return self._seconds(self._all_reduces, sums, size_bytes)

    def reduce_scatter(self, sums: Indices, size_bytes: Array, *, alone: bool) -> Array:
        """Likewise, where every device needs one part alone; an all-gather the other way round.

        `alone` says whether it pays the latency of its messages itself; gradients travel many at a time.
        """
        fixed, per_byte = self._reduce_scatters
        return self._seconds((fixed * alone, per_byte), sums, size_bytes)

    @cached_property
    def _all_reduces(self) -> tuple[Array, Array]:
        return self._by_bits(all_reduce)

    @cached_property
    def _reduce_scatters(self) -> tuple[Array, Array]:
        return self._by_bits(reduce_scatter)

    def _by_bits(self, collective: Callable[[LogicalMesh, tuple[int, ...]], Seconds]) -> tuple[Array, Array]:
        found = [collective(self.mesh, dimensions) for dimensions in _BITS]
        return np.array([one.fixed for one in found]), np.array([one.per_byte for one in found])

    @staticmethod
    def _seconds(prices: tuple[Array, Array], sums: Indices, size_bytes: Array) -> Array:
        fixed, per_byte = prices
        return fixed[sums] + per_byte[sums] * size_bytes


@dataclass
class LayerPricing:
    """The programme of one layer on a mesh, for a number of rows over the whole mesh."""

    prices: MeshPrices
    algorithms: GraphAlgorithms
    compute: LayerCompute
    rows: int

    def programme(self) -> Programme:
        """Eq. 1's costs: c of compute, d of communication, R of conversions; and the bytes of each choice."""
        graph = self.algorithms.graph
        inside = [np.zeros(count) for count in self.algorithms.counts]
        edges: dict[tuple[int, int], Array] = {}
        for read in graph.reads:
            source, target = graph.node_of[read.source], graph.node_of[read.operation]
            held, wanted = self.algorithms.output(read.source), self.algorithms.operators[read.operation]
            size = graph.operations[read.operation].operands[read.operand].elements * self._row_bytes
            layouts = wanted.operands[read.operand]
            if source == target:
                inside[source] += self.prices.resharding.seconds(held, layouts, size)
            else:
                seconds = self.prices.resharding.seconds(held[:, None], layouts[None, :], size)
                edges[source, target] = edges.get((source, target), 0.0) + seconds
        nodes = tuple(self._choices(number, extra) for number, extra in enumerate(inside))
        return Programme(nodes, tuple(Edge(source, target, found) for (source, target), found in edges.items()))

    def state_of(self, values: int) -> tuple[int, Array] | None:
        """The node whose operator holds a weight of so many values (or some more), and its state bytes there."""
        graph = self.algorithms.graph
        for index, operation in enumerate(graph.operations):
            if operation.weight is not None and operation.weight.elements >= values:
                return graph.node_of[index], self._holding(operation, self.algorithms.operators[index])[2]
        return None

    @cached_property
    def _row_bytes(self) -> int:
        """Bytes of a value of every row."""
        return self.rows * self.prices.value_bytes.used

    @cached_property
    def _activation_ratio(self) -> float:
        return self.compute.activation_ratio(self.rows)

    def _choices(self, number: int, extra: Array) -> Choices:
        costs = np.zeros((4, 2, self.algorithms.counts[number]))
        costs[0] += extra
        gathers = np.zeros(self.algorithms.counts[number])
        node = self.algorithms.graph.nodes[number]
        scattered = self._scattered(node)
        for index in node.operations:
            operation, found = self.algorithms.graph.operations[index], self.algorithms.operators[index]
            share = 1.0 if index == node.leader else scattered
            costs[0] += self._computing(index, found) * share + self._summing(operation, found)
            costs[3] += self._kept_bytes(operation, found) * share
            if operation.weight is not None:
                costs += self._holding(operation, found)
                gathers = np.maximum(gathers, found.weight_sums if found.weight_sums is not None else 0)
        costs[0, 1, gathers == 0] = np.inf
        return Choices(costs[0], costs[1], costs[2], costs[3])

    def _scattered(self, node: Node) -> Array | float:
        """What is left for a device of the followers' work where the leader's sum ends scattered."""
        if node.leader is None or not self.prices.rewriting.activations:
            return 1.0
        return scattered_share(self.algorithms.operators[node.leader].output_sums, self.prices.replicas)

    def _computing(self, index: int, found: OperatorAlgorithms) -> Array:
        seconds = {mapping: self._mapped_seconds(index, mapping) for mapping in set(found.mappings)}
        return np.array([seconds[mapping] for mapping in found.mappings])

    def _mapped_seconds(self, index: int, mapping: Mapping) -> float:
        rows, parts = self.rows, 1
        for size, loop in zip(self.prices.mesh.shape, mapping, strict=True):
            if loop is Loop.BATCH:
                rows //= size
            elif loop is not None:
                parts *= size
        return self.compute.seconds(index, rows, parts)

    def _summing(self, operation: Operation, found: OperatorAlgorithms) -> Array:
        """All-reduces of one micro-batch: of partial outputs forward, of operands' partial gradients backward."""
        prices, size = self.prices, self._row_bytes
        held = prices.shares[found.output] * operation.output.elements * size
        seconds = prices.all_reduce(found.output_sums, held)
        for operand, layouts, sums in zip(operation.operands, found.operands, found.operand_sums, strict=True):
            seconds = seconds + prices.all_reduce(sums, prices.shares[layouts] * operand.elements * size)
        if operation.summed is not None and found.own is not None and found.own_sums is not None:
            own = prices.shares[found.own] * operation.summed[0].elements * self.rows * 4
            seconds = seconds + 2 * prices.all_reduce(found.own_sums, own)
        return seconds

    def _kept_bytes(self, operation: Operation, found: OperatorAlgorithms) -> Array:
        layouts = found.operands[0] if found.operands else found.output
        saved = operation.saved_elements_per_row * self._row_bytes + operation.saved_bytes_per_row * self.rows
        return self.prices.shares[layouts] * saved * self._activation_ratio

    def _holding(self, operation: Operation, found: OperatorAlgorithms) -> Array:
        """[seconds, iteration seconds, state bytes, activation bytes; held; algorithm] of a weight.

        Gradients are scattered as sums; behind them, gradients (or, rewritten, updated weights) are gathered. A weight
        that is not held whole is gathered twice a micro-batch in place of that.
        """
        assert operation.weight is not None
        assert found.weight is not None
        assert found.weight_sums is not None
        prices, sizes, sums = self.prices, self.prices.value_bytes, found.weight_sums
        values = prices.shares[found.weight] * operation.weight.elements
        costs = np.zeros((4, 2, len(values)))
        costs[0, 1] = 2 * prices.reduce_scatter(sums, values * sizes.used, alone=not operation.trivial)
        scattered = prices.reduce_scatter(sums, values * sizes.gradient, alone=False)
        gathered = sizes.used if prices.rewriting.gradients else sizes.gradient
        whole = scattered + prices.reduce_scatter(sums, values * gathered, alone=False)
        costs[1] = whole, scattered
        update = self.compute.value_update_seconds()
        for held in (0, 1):
            state = weight_state(
                values, prices.replicas[sums], rewritten=prices.rewriting.gradients, gathered=held == 1
            )
            costs[1, held] += update * state.updated
            costs[2, held] = state.state_bytes(sizes)
        return costs
