"""Seconds of computation and bytes kept, operator by operator, from the profiles of whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainwright.cost.setting import Setting
from trainwright.layer import Dtype, LayerKind
from trainwright.profiles import LayerCost
from trainwright.search.alpa.intra.operation import Operation

FLOPS_PER_BYTE: dict[Dtype, float] = {Dtype.FLOAT32: 20.0, Dtype.FLOAT16: 150.0, Dtype.BFLOAT16: 150.0}
"""Where data-centre devices turn from being limited by memory to being limited by arithmetic, roughly. It serves
to divide a layer's profiled seconds among its operators, not to predict them."""


@dataclass
class LayerCompute:
    """One layer kind on the accelerators of a mesh; the slowest of them sets the pace."""

    setting: Setting
    kind: LayerKind
    operations: Sequence[Operation]
    accelerators: tuple[str, ...]
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    _weights: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def seconds(self, index: int, rows: int, parts: int) -> float:
        """Forward and backward of an operator for `rows` rows, of which this device computes one of `parts` parts.

        Where the layer was profiled divided that way, by the profile at that tensor degree; else by the least degree.
        """
        degree = parts if self.operations[index].split and self._is_profiled(parts) else self.least_degree
        shares = self._shares(rows, degree)
        divided = degree if self.operations[index].split else 1
        return self.layer_seconds(rows, degree) * shares[index] * divided / parts

    def value_update_seconds(self) -> float:
        """The optimizer's step, for each value of the layer."""
        degree = self.least_degree
        values = max(self.setting.values_at(self.kind, degree), 1)
        return max(self._cost(name, degree, 1).update_seconds for name in self.accelerators) / values

    def activation_ratio(self, rows: int) -> float:
        """Profiled over counted bytes that the layer keeps for the backward."""
        kept = self.kind.saved_bytes_per_row(self.setting.model.dtype, self.least_degree) * rows
        held = max(self._cost(name, self.least_degree, rows).activation_bytes for name in self.accelerators)
        return held / kept if kept else 1.0

    @cached_property
    def least_degree(self) -> int:
        """The least tensor degree at which all accelerators profiled the layer: 1 unless it was too large for that."""
        if not self.kind.is_tensor_parallel:
            return 1
        profiles = self.setting.profiles
        found = [set(profiles.tensor_degrees(name, self.kind.name)) for name in self.accelerators]
        return min(set[int].intersection(*found), default=1)

    def _cost(self, accelerator: str, degree: int, rows: int) -> LayerCost:
        return self.setting.layer_cost(accelerator, self.kind, degree, rows)

    def _is_profiled(self, degree: int) -> bool:
        return self.kind.is_tensor_parallel and all(
            self.setting.profiles.has(name, self.kind.name, degree) for name in self.accelerators
        )

    def layer_seconds(self, rows: int, degree: int) -> float:
        """Forward and backward of the whole layer at a tensor degree."""
        if (rows, degree) not in self._seconds:
            costs = [self._cost(name, degree, rows) for name in self.accelerators]
            self._seconds[rows, degree] = max(cost.forward_seconds + cost.backward_seconds for cost in costs)
        return self._seconds[rows, degree]

    def _shares(self, rows: int, degree: int) -> list[float]:
        """By operator: its share of the layer's seconds at a tensor degree; they add up to 1."""
        if (rows, degree) not in self._weights:
            dtype = self.setting.model.dtype
            weights = []
            for operation in self.operations:
                held = operation.weight.elements if operation.weight is not None else 0.0
                moved = (operation.moved_per_row * rows + held) * dtype.num_bytes
                weight = max(operation.flops_per_row * rows, moved * FLOPS_PER_BYTE[dtype])
                weights.append(weight / (degree if operation.split else 1))
            total = sum(weights) or 1.0
            self._weights[rows, degree] = [weight / total for weight in weights]
        return self._weights[rows, degree]
