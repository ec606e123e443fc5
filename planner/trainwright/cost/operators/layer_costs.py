"""Costs of one layer whose operators have shardings of their own, by pass, weight and byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import StateBytes
from trainwright.cost.operators.algorithm_costs import LayerIlpCosts, WeightCosts
from trainwright.cost.operators.integer_program import AssignmentCost
from trainwright.cost.operators.layer_specs import LayerAssignment
from trainwright.cost.time_terms import PassTime
from trainwright.operator_shardings import Loop
from trainwright.strategy import Sharding

NO_STATE = StateBytes(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class WeightCost:
    """Costs of weights on each device.

    Attributes:
        reduce_seconds: of their gradients, once an iteration.
        publish_seconds: of gathering them after shards of them were updated.
        updated_values: parameters that a device updates.
    """

    reduce_seconds: float = 0.0
    publish_seconds: float = 0.0
    update_seconds: float = 0.0
    state: StateBytes[float] = NO_STATE
    updated_values: float = 0.0

    @property
    def iteration_seconds(self) -> float:
        return self.reduce_seconds + self.publish_seconds + self.update_seconds

    def __add__(self, other: WeightCost) -> WeightCost:
        return WeightCost(
            self.reduce_seconds + other.reduce_seconds,
            self.publish_seconds + other.publish_seconds,
            self.update_seconds + other.update_seconds,
            StateBytes(*(own + added for own, added in zip(self.state, other.state, strict=True))),
            self.updated_values + other.updated_values,
        )

    def scaled(self, ratio: float) -> WeightCost:
        """Return a part of the costs."""
        return WeightCost(
            ratio * self.reduce_seconds,
            ratio * self.publish_seconds,
            ratio * self.update_seconds,
            StateBytes(*(ratio * part for part in self.state)),
            ratio * self.updated_values,
        )


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """Weight of a layer that layers of other kinds share.

    Attributes:
        part: axis of the table that each mesh dimension shards: 0 its entries, 1 their width; None: neither.
        values: parameters of the whole.
    """

    part: tuple[int | None, int | None]
    values: float
    cost: WeightCost


_TABLE_AXES: Final = {Loop.ENTRIES: 0, Loop.OUT: 0, Loop.WIDTH: 1, Loop.IN: 1}
"""Axis of a table of embeddings by the loops of its lookup, and of the projection that multiplies by it."""


@dataclass(frozen=True, slots=True)
class OperatorLayerCosts:
    """Costs of a layer on each device.

    Attributes:
        total: as the integer program adds them up.
        forward, backward: of one micro-batch, with one gather each of weights that are held sharded.
        weights: all but the shared one.
        shares_updates: whether gradients are reduce-scattered, so that at most one layer's are whole.
        entering, leaving: layouts of the tensors that enter and leave.
    """

    total: AssignmentCost
    forward: PassTime
    backward: PassTime
    weights: WeightCost
    shared: SharedWeight | None
    shares_updates: bool
    entering: tuple[int, ...]
    leaving: tuple[int, ...]

    def backward_with(self, recomputed: bool) -> PassTime:
        """Return the backward, after another forward if the layer is recomputed."""
        own, again = self.backward, self.forward
        if not recomputed:
            return own
        return PassTime(
            own.compute_seconds + again.compute_seconds,
            own.sync_seconds + again.sync_seconds,
            own.sharding_seconds,
            own.redistribution_seconds + again.redistribution_seconds,
        )


def layer_costs(pricing: LayerIlpCosts, assignment: LayerAssignment, shared_weight: str | None) -> OperatorLayerCosts:
    """Return the costs of a layer of which every node has one algorithm.

    `shared_weight` is the name of a weight that is costed by itself.
    """
    algorithms, graph = pricing.algorithms, pricing.algorithms.graph
    kind, resharding = pricing.compute.kind, pricing.mesh_costs.resharding
    computed = sum(float(pricing.compute_seconds(number)[0]) for number in range(len(graph.nodes)))
    forward_share = pricing.compute.forward_share(pricing.rows)
    sums = [[float(way[0]) for way in pricing.sum_seconds(index)] for index in range(len(graph.operations))]
    moved = [0.0, 0.0]
    for read in graph.operand_edges:
        source, size = int(algorithms.output_layouts(read.source)[0]), pricing.read_bytes(read)
        target = int(algorithms.operators[read.operation].operand_layouts[read.operand][0])
        moved[0] += float(resharding.one_way_seconds(source, target, size))
        moved[1] += float(resharding.one_way_seconds(target, source, size))
    own_index = pricing.operator_with_weight(kind.shared_parameters) if kind.shared_weight == shared_weight else None
    weights, shared, gathered, shares_updates = WeightCost(), None, 0.0, False
    for index, operation in enumerate(graph.operations):
        if operation.weight is None:
            continue
        mode, costs = assignment[graph.node_of[index]][0], pricing.weight(index)
        gathered += float(costs.gather_seconds[0]) * mode
        if index == own_index and shared_weight is not None:
            first, second = (
                None if loop is None else _TABLE_AXES.get(loop) for loop in algorithms.operators[index].mappings[0]
            )
            shared = SharedWeight((first, second), operation.weight.elements, _weight_cost(costs, mode))
            continue
        weights += _weight_cost(costs, mode)
        shares_updates |= pricing.mesh_costs.sharding(mode) is not Sharding.NONE and bool(costs.sums[0])
    forward, backward = (
        PassTime(computed * share, sum(each[way] for each in sums), gathered, moved[way])
        for way, share in enumerate((forward_share, 1 - forward_share))
    )
    entering = tuple(int(layouts[0]) for layouts in algorithms.inputs)
    leaving = tuple(int(algorithms.output_layouts(source)[0]) for source in graph.wired.outputs)
    total = pricing.programme().assignment_cost(assignment)
    return OperatorLayerCosts(total, forward, backward, weights, shared, shares_updates, entering, leaving)


def _weight_cost(costs: WeightCosts, mode: int) -> WeightCost:
    """Return the costs of a weight whose operator has one algorithm."""

    def only(values: Array) -> float:
        return float(values[0])

    return WeightCost(
        only(costs.reduce_seconds(mode)),
        only(costs.publish_seconds(mode)),
        only(costs.update_seconds(mode)),
        StateBytes(*map(only, costs.state(mode))),
        only(costs.updated_values(mode)),
    )
