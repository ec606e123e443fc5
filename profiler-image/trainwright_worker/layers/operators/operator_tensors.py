"""Tensors of a layer's operators on a mesh: operands, weights and results, each in the layout of its spec."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from trainwright.operator_shardings import LayerSpecs, OperatorSpecs
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.layouts import COPIED, PARTIAL, REPLICATED, Layout, read_layout
from trainwright_worker.layers.operators.operator_pace import OperatorPace
from trainwright_worker.layers.operators.placed_weights import PlacedWeight, place_weight, used_weights
from trainwright_worker.layers.operators.resharding import Mesh, Tensors, reshard

ROWS, POSITIONS, WIDTH = 0, 1, 2
HIDDEN = ROWS, POSITIONS, WIDTH, None
"""Axes of (rows, positions, width) for those of its spec, whose last counts experts, if there is one."""
KEYS = ROWS, WIDTH
"""Axes of attention's keys and values, which are whole along the positions."""
BY_ROWS = ROWS, REPLICATED


@dataclass(frozen=True, slots=True)
class Value:
    """Tensors of one layout that pass between operators, as queries, keys and values do."""

    tensors: Tensors
    layout: Layout


class OperatorTensors:
    """Tensors of a layer's operators on this rank, by the operators' names.

    Args:
        layer: holds this rank's parts of the weights.
        whole: same layer, unsharded; only its shapes and constants are read.

    Attributes:
        placed: layouts of the weights, by attribute.
        pace: set if the device's speed is emulated.
    """

    def __init__(self, layer: Layer, whole: Layer, specs: LayerSpecs, mesh: Mesh) -> None:
        self.layer, self.whole, self.mesh = layer, whole, mesh
        self.specs = {operator.name: operator for operator in specs.operators}
        self.pace: OperatorPace | None = None
        self._operands = {operator.name: _operand_layouts(operator) for operator in specs.operators}
        self._outputs = {operator.name: _output_layout(operator) for operator in specs.operators}
        self._used = used_weights(whole)
        self.placed: dict[str, PlacedWeight] = {
            weight.attribute: place_weight(whole, weight, self.specs[name])
            for name, weights in self._used.items()
            for weight in weights
        }

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

    def own_rows(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Return this rank's rows and positions of (rows, positions)."""
        return self.mesh.own_part(tokens, layout).contiguous()

    def weights(self, name: str) -> list[Tensor]:
        """Return this rank's parts of an operator's weights."""
        return [self.layer.get_parameter(weight.attribute) for weight in self._used.get(name, ())]

    def read(self, name: str, value: Value, number: int = 0) -> Tensors:
        """Return an operator's operand in the layout of its spec."""
        return reshard(self.mesh, value.tensors, value.layout, self.operand_layout(name, number))

    def written(self, name: str, *tensors: Tensor) -> Value:
        """Return what an operator has computed."""
        stated = tensors if self.pace is None else self.pace.state(name, tensors)
        return Value(stated, self.output_layout(name))


def _operand_layouts(specs: OperatorSpecs) -> tuple[Layout, ...]:
    axes_of = HIDDEN, KEYS if specs.name == "attention" else HIDDEN
    return tuple(
        read_layout(words, axes[: len(words.split())], specs.mapping, COPIED)
        for words, axes in zip(specs.operands, axes_of, strict=False)
    )


def _output_layout(specs: OperatorSpecs) -> Layout:
    return read_layout(specs.output, HIDDEN[: len(specs.output.split())], specs.mapping, PARTIAL)
