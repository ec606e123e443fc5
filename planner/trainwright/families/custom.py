"""User's own model, whose sizes are counted from the model itself, not by a formula."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, Literal

from trainwright.families.operators import LARGEST_SIZE, MOST_LAYERS
from trainwright.layer import Attention, LayerKind, LayerList, Operator, OperatorKind, Segment

_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class CustomKind:
    """Sizes of a user model's uniform layers.

    Attributes:
        name: unique in its model.
        parameters: of one layer.
        forward_flops_per_row: 2 for each multiply-add of its products.
        output_elements_per_row: of the tensors that it passes on; 1 after the last layer.
        saved_elements_per_row: in the model's dtype, saved by the forward for the backward, including its input.
        saved_bytes_per_row: saved in other formats (indices, masks).
    """

    name: str
    parameters: int
    forward_flops_per_row: float
    output_elements_per_row: int
    saved_elements_per_row: float
    saved_bytes_per_row: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("custom.kinds: every kind needs a name")
        for field, least in (
            *(("parameters", 0), ("forward_flops_per_row", 0), ("output_elements_per_row", 1)),
            *(("saved_elements_per_row", 0), ("saved_bytes_per_row", 0)),
        ):
            if not least <= getattr(self, field) <= LARGEST_SIZE:
                raise ValueError(
                    f"custom.kinds: {field} of {self.name} must be {least} … {LARGEST_SIZE:g}, got {getattr(self, field)}"
                )

    def layer_kind(self) -> LayerKind:
        """Return the kind as one product of the same FLOPs and weights, and one operator that reads the saved tensors.

        Measured profiles need no more; estimates from data sheets assume a square product.
        """
        flops, kept = self.forward_flops_per_row, self.saved_elements_per_row
        operators = []
        if flops > 0:
            positions = max(round(flops / 2 / max(self.parameters, 1)), 1)
            width = max(math.isqrt(self.parameters), 1)
            operators.append(
                Operator(
                    name="products",
                    kind=OperatorKind.CONVOLUTION,
                    forward_flops_per_row=flops,
                    input_elements_per_row=positions * width,
                    output_elements_per_row=positions * width,
                    positions_per_row=positions,
                    weight_elements=self.parameters,
                )
            )
        operators.append(
            Operator(
                name="element_wise",
                kind=OperatorKind.ELEMENT_WISE,
                forward_flops_per_row=0.0,
                input_elements_per_row=kept,
                output_elements_per_row=kept,
                weight_elements=0 if flops > 0 else self.parameters,
                saved_elements_per_row=kept,
                saved_bytes_per_row=self.saved_bytes_per_row,
            )
        )
        return LayerKind(self.name, (Segment(tuple(operators)),), self.output_elements_per_row)


@dataclass(frozen=True, slots=True)
class Custom:
    """User's own model, as `python -m trainwright_worker.describe` reports it; no tensor degree splits its layers.

    Attributes:
        entrypoint: `package.module:function` on the worker's PYTHONPATH, which makes the layers.
        kinds: of layers, each once.
        layers: name of each layer's kind, in order.
    """

    entrypoint: str
    kinds: tuple[CustomKind, ...]
    layers: tuple[str, ...]
    family: Literal["custom"] = "custom"

    def __post_init__(self) -> None:
        if not _ENTRYPOINT.fullmatch(self.entrypoint):
            raise ValueError(f"custom.entrypoint must be written package.module:function, got {self.entrypoint!r}")
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise ValueError(f"custom.layers must name 1 … {MOST_LAYERS} layers, got {len(self.layers)}")
        names = [kind.name for kind in self.kinds]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"custom.kinds gives {twice} twice; name each kind once")
        if unknown := set(self.layers) - set(names):
            raise ValueError(
                f"custom.layers names {min(unknown)}, which custom.kinds does not give; describe the model again"
            )
        if unused := set(names) - set(self.layers):
            raise ValueError(
                f"custom.kinds gives {min(unused)}, but no layer is of that kind; describe the model again"
            )

    def stack(self, attention: Attention) -> LayerList:  # noqa: ARG002 - what it keeps was counted
        return LayerList(tuple(kind.layer_kind() for kind in self.kinds), self.layers, 1)
