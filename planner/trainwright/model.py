"""What to train: a family's list of layers, each of a kind, in a number format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainwright.families import Family
from trainwright.layer import Attention, Dtype, LayerKind


@dataclass(frozen=True)
class Model:
    """A list of layers, each of a kind. `Model.of` makes it; `family` lets a worker build the same layers."""

    family: Family
    dtype: Dtype
    kinds: tuple[LayerKind, ...]
    layers: tuple[str, ...]
    max_tensor_degree: int

    @classmethod
    def of(cls, family: Family, dtype: Dtype = Dtype.FLOAT32, attention: Attention = Attention.FUSED) -> Model:
        """The model of a family."""
        stack = family.stack(attention)
        return cls(family, dtype, stack.kinds, stack.layers, stack.max_tensor_degree)

    @cached_property
    def _kinds(self) -> dict[str, LayerKind]:
        return {kind.name: kind for kind in self.kinds}

    def kind(self, name: str) -> LayerKind:
        """The kind of that name."""
        return self._kinds[name]

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of the layer with that index (0 is the first)."""
        return self._kinds[self.layers[layer]]

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The layers that hold a weight which layers of other kinds may hold, too."""
        return tuple(layer for layer in range(len(self.layers)) if self.kind_of(layer).shared_weight is not None)

    @property
    def parameters(self) -> int:
        """Values of the whole model, a shared weight counted once."""
        total = sum(self.kind_of(layer).parameters for layer in range(len(self.layers)))
        owners: dict[str, list[int]] = {}
        for layer in range(len(self.layers)):
            kind = self.kind_of(layer)
            if kind.shared_weight is not None:
                owners.setdefault(kind.shared_weight, []).append(kind.shared_parameters)
        return total - sum(sum(sizes) - max(sizes) for sizes in owners.values())

    def output_bytes_per_row(self, layer: int) -> int:
        """Bytes of the boundary behind a layer, per row."""
        return self.kind_of(layer).output_elements_per_row * self.dtype.num_bytes
