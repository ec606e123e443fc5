"""Costs of a stage of a plan whose operators have shardings of their own: those that Alpa's integer program adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from operator import add

from trainwright.cost.collectives import Nodes
from trainwright.cost.context import CostContext, KnownStages
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import StateBytes
from trainwright.cost.operators.algorithm_costs import LayerCompute, LayerIlpCosts, MeshCosts, Rewriting
from trainwright.cost.operators.integer_program import AssignmentCost
from trainwright.cost.operators.layer_specs import LayerAssignment, layer_operators
from trainwright.cost.operators.meshes import mesh_of
from trainwright.cost.operators.operator_graph import GraphNode, OperatorGraph
from trainwright.cost.operators.parallel_algorithms import AlgorithmSpace, GraphAlgorithms, is_possible
from trainwright.cost.operators.sharding_specs import layout_number
from trainwright.cost.operators.shared_weights import largest_shared_weight, shared_weight_overcount
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.operator_shardings import LayerSpecs, Loop, OperatorSpecs, SpanSpecs, WeightHeld
from trainwright.plan import Stage

NO_STATE = StateBytes(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class OperatorStageCosts:
    """Costs of operators on each device of their stage.

    Attributes:
        total: as the integer program adds them up; a weight that several layers share counts once in its bytes.
        forward_compute_seconds, backward_compute_seconds: of one micro-batch; a layer's are divided as its profile says.
        resharding_seconds: of one micro-batch, forward and backward, between operators.
        update_seconds: of the optimizer; the rest of an iteration's seconds is communication.
        state: parts of `total.state_bytes`.
    """

    total: AssignmentCost
    forward_compute_seconds: float
    backward_compute_seconds: float
    resharding_seconds: float
    update_seconds: float
    state: StateBytes[float]

    @property
    def other_seconds(self) -> float:
        """Seconds of one micro-batch in collectives of partial sums and of weights, forward and backward."""
        computed = self.forward_compute_seconds + self.backward_compute_seconds
        return self.total.seconds - computed - self.resharding_seconds

    def __add__(self, other: OperatorStageCosts) -> OperatorStageCosts:
        """Return the costs of both, one after the other."""
        totals = (getattr(self.total, each.name) + getattr(other.total, each.name) for each in fields(AssignmentCost))
        return OperatorStageCosts(
            AssignmentCost(*totals),
            self.forward_compute_seconds + other.forward_compute_seconds,
            self.backward_compute_seconds + other.backward_compute_seconds,
            self.resharding_seconds + other.resharding_seconds,
            self.update_seconds + other.update_seconds,
            add_state(self.state, other.state),
        )

    def times(self, count: int) -> OperatorStageCosts:
        """Return the costs of as many layers like this one."""
        return OperatorStageCosts(
            AssignmentCost(*(count * getattr(self.total, each.name) for each in fields(AssignmentCost))),
            count * self.forward_compute_seconds,
            count * self.backward_compute_seconds,
            count * self.resharding_seconds,
            count * self.update_seconds,
            add_state(NO_STATE, self.state, count),
        )


def add_state(first: StateBytes[float], second: StateBytes[float], share: float = 1.0) -> StateBytes[float]:
    """Return the sum of the first bytes and of a share of the second ones."""
    return StateBytes(*(mine + share * added for mine, added in zip(first, second, strict=True)))


def operator_stage_costs(stage: Stage, context: CostContext) -> OperatorStageCosts:
    """Return the costs of a stage with shardings of operators; stages that plans share are costed once.

    Raises:
        ValueError: The operators are not those of the model, or cannot be sharded so; the sentence names layer and operator.
    """
    assert stage.operators is not None
    nodes, rows = tuple(device.node for device in stage.devices), sum(stage.layers[0].rows)
    cached: KnownStages[OperatorStageCosts] = context.known_operator_stages
    specs = stage.operators
    return cached.value((nodes, specs, rows), lambda: _StageCosts(specs, nodes, rows, context).total())


_Entering = tuple[int, ...] | None
"""Layouts of the tensors that enter a layer; None before the first layer of a stage."""


@dataclass
class _StageCosts:
    specs: SpanSpecs
    nodes: Nodes
    rows: int
    context: CostContext
    _graphs: dict[str, OperatorGraph] = field(default_factory=dict)
    _layers: dict[
        tuple[str, tuple[OperatorSpecs, ...], _Entering], tuple[OperatorStageCosts, StateBytes[float], tuple[int, ...]]
    ] = field(default_factory=dict)

    def total(self) -> OperatorStageCosts:
        """Return the costs of all layers."""
        entering: _Entering = None
        costs, shared = list[OperatorStageCosts](), NO_STATE
        for layers in self.specs.layers:
            self._check_kind(layers)
            remaining = layers.count
            while remaining:
                cost, owned, leaving = self._layer(layers, entering)
                equal = remaining if leaving == entering else 1
                costs.append(cost.times(equal))
                shared = add_state(shared, owned, equal)
                entering, remaining = leaving, remaining - equal
        added = reduce(add, costs)
        overcount = float(shared_weight_overcount(self.context.model)[self.specs.first, self.specs.end])
        once = replace(added.total, state_bytes=added.total.state_bytes - overcount * shared.total)
        return replace(added, total=once, state=add_state(added.state, shared, -overcount))

    @cached_property
    def _prices(self) -> MeshCosts:
        mesh = mesh_of(self.nodes, self.specs.mesh_shape, self.context)
        return MeshCosts(mesh, self.context, self._rewriting)

    @cached_property
    def _rewriting(self) -> Rewriting:
        """All-reduces that the specs say are rewritten; every operator's must agree, which `_check` sees to."""
        operators = [operator for _, operator in self.specs.operators()]
        whole = [each for each in operators if each.weight is not None and each.weight_held is WeightHeld.WHOLE]
        return Rewriting(
            any(each.update_sharded for each in whole) or not whole, any(each.sum_scattered for each in operators)
        )

    def _layer(
        self, layer: LayerSpecs, entering: _Entering
    ) -> tuple[OperatorStageCosts, StateBytes[float], tuple[int, ...]]:
        """Return a layer's costs, the state of its shared weight, and the layouts in which its outputs leave."""
        key = layer.kind, layer.operators, entering
        if key not in self._layers:
            self._layers[key] = self._costs(layer, entering)
        return self._layers[key]

    def _costs(
        self, layer: LayerSpecs, entering: _Entering
    ) -> tuple[OperatorStageCosts, StateBytes[float], tuple[int, ...]]:
        graph = self._graph(layer)
        algorithms = self._algorithms(layer, graph, entering)
        assignment = [(self._weight_mode(layer, node), 0) for node in graph.nodes]
        _check(layer, layer_operators(algorithms, self._rewriting, assignment))
        kind = self.context.model.kind(layer.kind)
        compute = LayerCompute(self.context, kind, graph.operations, self._prices.mesh.accelerators)
        pricing = LayerIlpCosts(self._prices, algorithms, compute, self.rows)
        leaving = tuple(int(algorithms.output_layouts(source)[0]) for source in graph.wired.outputs)
        return self._parts(pricing, assignment), self._shared_state(pricing, assignment), leaving

    def _check_kind(self, layers: LayerSpecs) -> None:
        """Raise ValueError for the first layer that is of another kind in the model."""
        for layer, kind in enumerate(self.context.model.layers[layers.layer : layers.end], start=layers.layer):
            if layers.kind != kind:
                raise ValueError(f"layer {layer}: operators: expected those of kind {kind}, got {layers.kind}")

    def _graph(self, layer: LayerSpecs) -> OperatorGraph:
        model = self.context.model
        kind = model.kind(layer.kind)
        if kind.name not in self._graphs:
            self._graphs[kind.name] = OperatorGraph.of(wire_layer(model, kind))
        graph = self._graphs[kind.name]
        names, given = [each.name for each in graph.operations], [each.name for each in layer.operators]
        if names != given:
            raise ValueError(f"{layer.where}: operators: expected {', '.join(names)}, got {', '.join(given) or 'none'}")
        return graph

    def _algorithms(self, layer: LayerSpecs, graph: OperatorGraph, entering: _Entering) -> GraphAlgorithms:
        chosen = [operator.mapping for operator in layer.operators]
        has_sequences = any(Loop.SEQUENCE in mapping for mapping in chosen)
        space = AlgorithmSpace(self.specs.mesh_shape, self.rows, has_sequences)
        for node in graph.nodes:
            if node.leader is not None and not is_possible(graph.operations[node.leader], chosen[node.leader], space):
                operator, loops = layer.operators[node.leader], graph.operations[node.leader].loops
                sizes = ", ".join(f"{loop} {self.rows if loop is Loop.BATCH else size}" for loop, size in loops)
                shape = " × ".join(map(str, self.specs.mesh_shape))
                raise ValueError(
                    f"{layer.where}, operator {operator.name}: a mesh of {shape} cannot shard it {operator.algorithm}; "
                    f"its loops are {sizes}"
                )
        if entering is None:
            entering = tuple(self._first_layout(layer, graph, number) for number in range(graph.wired.inputs))
        return GraphAlgorithms.chosen(graph, entering, chosen)

    @staticmethod
    def _first_layout(layer: LayerSpecs, graph: OperatorGraph, number: int) -> int:
        """Return the layout in which a stage's first layer takes an input: that of the operator that follows or first reads it."""
        readers = [(each.operation, each.operand) for each in graph.nodes[number].followers if each.source < 0]
        readers += [(read.operation, read.operand) for read in graph.operand_edges if read.source == -1 - number]
        if not readers:
            return 0
        index, place = readers[0]
        operand = graph.operations[index].operands[place]
        first, second = layer.operators[index].mapping
        return layout_number(operand.axis(first), operand.axis(second))

    @staticmethod
    def _weight_mode(layer: LayerSpecs, node: GraphNode) -> int:
        return int(any(layer.operators[index].weight_held is WeightHeld.GATHERED for index in node.operations))

    @staticmethod
    def _parts(pricing: LayerIlpCosts, assignment: LayerAssignment) -> OperatorStageCosts:
        graph, programme = pricing.algorithms.graph, pricing.programme()
        computed = sum(float(pricing.compute_seconds(number)[0]) for number in range(len(graph.nodes)))
        forward = computed * pricing.compute.forward_share(pricing.rows)
        update, state = 0.0, NO_STATE
        for index, mode in _weights(graph, assignment):
            update += float(pricing.weight(index).update_seconds(mode)[0])
            state = add_state(state, _of_only_algorithm(pricing.weight(index).state(mode)))
        resharding = sum(float(edge.seconds[0, 0]) for edge in programme.edges)
        total = programme.assignment_cost(assignment)
        return OperatorStageCosts(total, forward, computed - forward, resharding, update, state)

    def _shared_state(self, pricing: LayerIlpCosts, assignment: LayerAssignment) -> StateBytes[float]:
        """Return the state of the model's largest shared weight in a layer, zero if the layer lacks it."""
        kind = pricing.compute.kind
        if kind.shared_weight is None or kind.shared_weight != largest_shared_weight(self.context.model):
            return NO_STATE
        index = pricing.operator_with_weight(kind.shared_parameters)
        if index is None:
            return NO_STATE
        return _of_only_algorithm(pricing.weight(index).state(assignment[pricing.algorithms.graph.node_of[index]][0]))


def _weights(graph: OperatorGraph, assignment: LayerAssignment) -> Sequence[tuple[int, int]]:
    """Return every operator with a weight, and the weight mode of its node."""
    return [
        (index, assignment[graph.node_of[index]][0])
        for index, operation in enumerate(graph.operations)
        if operation.weight is not None
    ]


def _of_only_algorithm(state: StateBytes[Array]) -> StateBytes[float]:
    """Return the bytes of a graph's only algorithm."""
    return StateBytes(*(float(part[0]) for part in state))


def _check(given: LayerSpecs, expected: Sequence[OperatorSpecs]) -> None:
    """Raise ValueError for the first field of an operator that its loops contradict."""
    for own, other in zip(given.operators, expected, strict=True):
        for each in fields(OperatorSpecs):
            value, implied = getattr(own, each.name), getattr(other, each.name)
            if value != implied:
                raise ValueError(
                    f"{given.where}, operator {own.name}: {each.name}: expected {_shown(implied)}, as its algorithm and "
                    f"the operators before it imply, got {_shown(value)}"
                )


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
