"""Tensors of a layer's operators on a mesh: operands, weights and results, each in the layout of its spec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from torch import Tensor

from trainwright.loop_nests.layer_wiring import LayerWiring
from trainwright.loop_nests.operations import Axis, IndexedTensor
from trainwright.operator_shardings import LayerSpecs
from trainwright_worker.layers.layer import Data, Layer
from trainwright_worker.layers.operators.layouts import COPIED, PARTIAL, REPLICATED, Layout, read_layout, without_sums
from trainwright_worker.layers.operators.operator_pace import OperatorPace
from trainwright_worker.layers.operators.placed_weights import PlacedWeight, UsedWeight, place_weight
from trainwright_worker.layers.operators.resharding import Mesh, Tensors, reshard

ROWS, POSITIONS, WIDTH = 0, 1, 2
DATA_VALUES: Final = 1
"""Dimension of data (rows, values, …), such as the channels of images."""
SEQUENCES: Final[Mapping[Axis, int]] = {Axis.BATCH: ROWS, Axis.SEQUENCE: POSITIONS, Axis.WIDTH: WIDTH}
"""Dimensions of (rows, positions, width) for the axes that a mesh shards; it has none that counts experts."""


T = TypeVar("T")


def require(value: object, made: type[T]) -> T:
    """Return a layer or a value. Raises TypeError unless it is of a class."""
    if not isinstance(value, made):
        raise TypeError(f"expected a {made.__name__}, got {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class Value:
    """Tensors of one layout that pass between operators, as queries, keys and values do.

    Attributes:
        loss: what the operator adds to the loss, 0 where another rank adds the same.
    """

    tensors: Tensors
    layout: Layout
    loss: Tensor | None = None

    def converted(self, mesh: Mesh, layout: Layout) -> Tensors:
        """Return the tensors in another layout."""
        return reshard(mesh, self.tensors, self.layout, layout)

    def summed(self, mesh: Mesh) -> Value:
        """Return the value without partial sums."""
        complete = without_sums(self.layout)
        if complete == self.layout:
            return self
        return replace(self, tensors=self.converted(mesh, complete), layout=complete)


@dataclass(frozen=True, slots=True)
class ShardedOperator:
    """Operator that runs on parts of its tensors.

    Attributes:
        compute: converts the operands to the layouts of their specs, and computes this rank's part of the result.
        weights: those that it uses, in the order in which it reads them; of some a layer may have none, such as biases.
        dimensions: of its operands and result, by the axes that a mesh shards.
        weights_used_by: operator whose loops say where a gradient of its weights is a sum; empty: its own.
    """

    compute: Callable[[OperatorCall], Value]
    weights: tuple[UsedWeight, ...] = ()
    dimensions: Mapping[Axis, int] = field(default_factory=lambda: SEQUENCES)
    weights_used_by: str = ""


LayerOperators = Mapping[str, ShardedOperator]
"""Operators of a layer, by the names that the planner gives them."""


class OperatorTensors:
    """Tensors of a layer's operators on this rank, by the operators' names.

    Args:
        layer: holds this rank's parts of the weights.
        whole: same layer, unsharded; only its shapes and constants are read.
        operators: of the layer.
        wiring: which operator reads which, and what the axes of their specs are.

    Attributes:
        placed: layouts of the weights, by attribute.
        pace: set if the device's speed is emulated.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a layer, its operators, and where they run
        self,
        layer: Layer,
        whole: Layer,
        operators: LayerOperators,
        wiring: LayerWiring,
        specs: LayerSpecs,
        mesh: Mesh,
    ) -> None:
        self.layer, self.whole, self.operators, self.wiring, self.mesh = layer, whole, operators, wiring, mesh
        self.specs = {operator.name: operator for operator in specs.operators}
        self.pace: OperatorPace | None = None
        operations = {operation.name: operation for operation in wiring.operations}
        self._operands = {
            name: tuple(
                self._layout(name, operand, words, COPIED)
                for operand, words in zip(operations[name].operands, spec.operands, strict=True)
            )
            for name, spec in self.specs.items()
        }
        self._outputs = {
            name: self._layout(name, operations[name].output, spec.output, PARTIAL) for name, spec in self.specs.items()
        }
        parameters = dict(whole.named_parameters())
        self.placed: dict[str, PlacedWeight] = {
            weight.attribute: place_weight(
                whole, weight, self.specs[name], self.specs[operator.weights_used_by or name].mapping
            )
            for name, operator in operators.items()
            if name in self.specs
            for weight in operator.weights
            if weight.attribute in parameters
        }

    def _layout(self, name: str, tensor: IndexedTensor, words: str, unsharded: int) -> Layout:
        dimensions = self.operators[name].dimensions
        axes = tuple(dimensions.get(axis) for _, axis in tensor.axes)
        return read_layout(words, axes, self.specs[name].mapping, unsharded)

    def operand_layout(self, name: str, number: int = 0) -> Layout:
        """Return the layout in which an operator reads an operand."""
        return self._operands[name][number]

    def output_layout(self, name: str) -> Layout:
        """Return the layout of what an operator computes."""
        return self._outputs[name]

    def part_count(self, name: str) -> int:
        """Return the number of parts into which the ranks divide an operator; others compute the same."""
        pairs = zip(self.specs[name].mapping, self.mesh.shape, strict=True)
        return math.prod(size for loop, size in pairs if loop is not None)

    def weights(self, name: str) -> list[Tensor]:
        """Return this rank's parts of an operator's weights."""
        attributes = [weight.attribute for weight in self.operators[name].weights if weight.attribute in self.placed]
        return [self.layer.get_parameter(attribute) for attribute in attributes]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One use of an operator in a forward.

    Attributes:
        operands: in the layouts of the operators that computed them.
        data: all rows of the micro-batch.
    """

    layer: OperatorTensors
    name: str
    operands: tuple[Value, ...]
    data: Data

    @property
    def mesh(self) -> Mesh:
        """Return the ranks that share the operator."""
        return self.layer.mesh

    @property
    def whole(self) -> Layer:
        """Return the layer, unsharded, for its constants."""
        return self.layer.whole

    @property
    def weights(self) -> list[Tensor]:
        """Return this rank's parts of the operator's weights."""
        return self.layer.weights(self.name)

    @property
    def output_layout(self) -> Layout:
        """Return the layout of the result."""
        return self.layer.output_layout(self.name)

    def operand_layout(self, number: int = 0) -> Layout:
        """Return the layout in which the operator reads an operand."""
        return self.layer.operand_layout(self.name, number)

    def read(self, number: int = 0) -> Tensors:
        """Return an operand in the layout of its spec."""
        return self.operands[number].converted(self.mesh, self.operand_layout(number))

    def own_rows(self, field: str, layout: Layout) -> Tensor:
        """Return this rank's part of a field of the data."""
        return self.mesh.own_part(self.data[field], layout).contiguous()

    def data_layout(self, weight_axis: int) -> Layout:
        """Return the layout of data (rows, values, …) whose values are divided as an axis of the operator's first weight is."""
        (weight, *_) = self.layer.operators[self.name].weights
        first, second = (
            ROWS if written == ROWS else DATA_VALUES if axis == weight_axis else REPLICATED
            for written, axis in zip(self.output_layout, self.layer.placed[weight.attribute].layout, strict=True)
        )
        return first, second

    def written(self, *tensors: Tensor) -> Value:
        """Return what the operator has computed."""
        pace = self.layer.pace
        return Value(tensors if pace is None else pace.state(self.name, tensors), self.output_layout)

    def added_loss(self, loss: Tensor, layout: Layout, *summed_axes: int) -> Tensor:
        """Return a loss that is added once.

        Along mesh dimensions that shard none of the axes over which the loss is a sum, all ranks have the same, and the first
        adds it; gradients need it on all.
        """
        pairs = zip(layout, self.mesh.coordinates, strict=True)
        if all(placement in summed_axes or coordinate == 0 for placement, coordinate in pairs):
            return loss
        return loss - loss.detach()
