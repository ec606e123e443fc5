"""Weights of sharded operators: the parameters that they use, and their layouts on the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.operator_shardings import LoopMapping, OperatorSpecs, WeightHeld
from trainwright.strategy import Sharding
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.layouts import COPIED, Layout, read_layout, sharding_dimensions

PRODUCT: Final = (-1, -2)
"""Dimensions of the weight of a product, (…, out, in), for the axes of its spec: in, out."""
PRODUCT_BIAS: Final = (None, -1)
TABLE: Final = (-2, -1)
"""Dimensions of a table (entries, width)."""
PER_WIDTH: Final = (-1, None)
"""Dimension of a weight (width,); the other axis of its spec counts experts."""
PER_HEAD: Final = (None, None)
"""Dimensions of a weight that all heads share, whatever its spec says: each rank has it whole."""
POSITION_TABLE: Final = (-1,)
"""Dimension of a table (entries, width) for the only axis of its spec: each rank has all entries."""


@dataclass(frozen=True, slots=True)
class UsedWeight:
    """Weight that an operator uses.

    Attributes:
        attribute: name of the layer's parameter.
        dimensions: its dimension for each axis of the operator's weight spec; None where it has none.
    """

    attribute: str
    dimensions: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """Weight of a layer on a mesh.

    Attributes:
        layout: COPIED on the dimensions along which each rank computes one summand of the gradient.
        sharding: what the ranks along these dimensions share of it.
    """

    attribute: str
    layout: Layout
    sharding: Sharding

    @property
    def summed_dimensions(self) -> tuple[int, ...]:
        """Return the mesh dimensions over which its gradient is summed."""
        return sharding_dimensions(self.layout, COPIED)


def used(dimensions: tuple[int | None, ...], *attributes: str) -> tuple[UsedWeight, ...]:
    """Return weights with the same dimensions."""
    return tuple(UsedWeight(attribute, dimensions) for attribute in attributes)


def with_bias(dimensions: tuple[int | None, ...], name: str) -> tuple[UsedWeight, ...]:
    """Return the weight `<name>_weight` of a product, with its bias `<name>_bias`."""
    return (*used(dimensions, f"{name}_weight"), *used(PRODUCT_BIAS, f"{name}_bias"))


def place_weight(layer: Layer, used: UsedWeight, specs: OperatorSpecs, mapping: LoopMapping) -> PlacedWeight:
    """Return where an operator's weight lies, which is used by loops of this mapping. `layer` is unsharded."""
    count = layer.get_parameter(used.attribute).dim()
    axes = tuple(None if dimension is None else dimension % count for dimension in used.dimensions)
    sharding = Sharding.ZERO2 if specs.update_sharded else Sharding.NONE
    if specs.weight_held is WeightHeld.GATHERED:
        sharding = Sharding.ZERO3
    return PlacedWeight(used.attribute, read_layout(specs.weight or "", axes, mapping, COPIED), sharding)
