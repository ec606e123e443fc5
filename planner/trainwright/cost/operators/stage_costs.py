"""Costs of a stage of a plan whose operators have shardings of their own: those that Alpa's integer program adds up.

The passes hide what those of other stages hide: gathers of the next layer's weights, and reductions of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from trainwright.cost.collectives import Nodes
from trainwright.cost.context import CostContext, KnownStages
from trainwright.cost.operators.algorithm_costs import LayerCompute, LayerIlpCosts, MeshCosts, Rewriting
from trainwright.cost.operators.layer_costs import OperatorLayerCosts, layer_costs
from trainwright.cost.operators.layer_specs import layer_operators
from trainwright.cost.operators.meshes import mesh_of
from trainwright.cost.operators.operator_graph import GraphNode, OperatorGraph
from trainwright.cost.operators.parallel_algorithms import AlgorithmSpace, GraphAlgorithms, is_possible
from trainwright.cost.operators.sharding_specs import layout_number
from trainwright.cost.operators.shared_weights import largest_shared_weight
from trainwright.cost.operators.stage_passes import OperatorStageCosts, StagePasses
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.operator_shardings import LayerSpecs, Loop, OperatorSpecs, SpanSpecs, WeightHeld
from trainwright.plan import LayerRun, Stage


def operator_stage_costs(stage: Stage, context: CostContext) -> OperatorStageCosts:
    """Return the costs of a stage with shardings of operators; stages that plans share are costed once.

    Raises:
        ValueError: The operators are not those of the model, or cannot be sharded so; the sentence names layer and operator.
    """
    assert stage.operators is not None
    nodes, runs, specs = tuple(device.node for device in stage.devices), stage.layers, stage.operators
    cached: KnownStages[OperatorStageCosts] = context.known_operator_stages
    return cached.value((nodes, specs, runs), lambda: _StageLayers(specs, nodes, runs, context).costs())


_Entering = tuple[int, ...] | None
"""Layouts of the tensors that enter a layer; None before the first layer of a stage."""


@dataclass
class _StageLayers:
    """Layers of a stage, each costed once for equal operators and layouts."""

    specs: SpanSpecs
    nodes: Nodes
    runs: tuple[LayerRun, ...]
    context: CostContext
    _graphs: dict[str, OperatorGraph] = field(default_factory=dict)
    _layers: dict[tuple[str, tuple[OperatorSpecs, ...], _Entering], OperatorLayerCosts] = field(default_factory=dict)

    def costs(self) -> OperatorStageCosts:
        """Return the costs of all layers."""
        passes = StagePasses(self.specs, self.nodes, self.runs, self.context, self._prices, tuple(self._each_layer()))
        return passes.costs()

    def _each_layer(self) -> Iterator[OperatorLayerCosts]:
        entering: _Entering = None
        for specs in self.specs.layers:
            self._check_kind(specs)
            for _ in range(specs.count):
                yield (costs := self._layer(specs, entering))
                entering = costs.leaving

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on the whole mesh."""
        return sum(self.runs[0].rows)

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

    def _layer(self, layer: LayerSpecs, entering: _Entering) -> OperatorLayerCosts:
        key = layer.kind, layer.operators, entering
        if key not in self._layers:
            self._layers[key] = self._costs(layer, entering)
        return self._layers[key]

    def _costs(self, layer: LayerSpecs, entering: _Entering) -> OperatorLayerCosts:
        graph = self._graph(layer)
        algorithms = self._algorithms(layer, graph, entering)
        assignment = [(self._weight_mode(layer, node), 0) for node in graph.nodes]
        _check(layer, layer_operators(algorithms, self._rewriting, assignment))
        kind = self.context.model.kind(layer.kind)
        compute = LayerCompute(self.context, kind, graph.operations, self._prices.mesh.accelerators)
        pricing = LayerIlpCosts(self._prices, algorithms, compute, self.rows)
        return layer_costs(pricing, assignment, largest_shared_weight(self.context.model))

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
        space = AlgorithmSpace(self.specs.mesh_shape, self.rows)
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
