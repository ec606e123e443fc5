"""Which layers a stage's devices have the memory for, for all cuts at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Accelerator
from trainwright.cost import memory
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array, spans


@dataclass
class StageMemory:
    """Bytes of every possible stage of a problem; what candidates share is computed once."""

    problem: Problem
    _held: dict[int, Array] = field(default_factory=dict)
    _activations: dict[tuple[str, int, int], Array] = field(default_factory=dict)
    _fits: dict[tuple[str, int, int, tuple[int, ...]], NDArray[np.bool_]] = field(default_factory=dict)

    @cached_property
    def row_bytes(self) -> Array:
        """[end] of what one row brings over a boundary before layer `end`."""
        model = self.problem.model
        return np.array([0.0, *(model.output_bytes_per_row(layer) for layer in range(len(model.layers)))])

    def fits(self, accelerator: Accelerator, tensor: int, rows: int, kept: tuple[int, ...]) -> NDArray[np.bool_]:
        """[stage, first, end] whether such a device has the memory, where stage i keeps kept[i] micro-batches."""
        key = (accelerator.name, tensor, rows, kept)
        if key not in self._fits:
            needed = self.needed(accelerator.name, tensor, rows, np.array(kept, dtype=float))
            self._fits[key] = needed <= accelerator.memory_bytes
        return self._fits[key]

    def needed(self, accelerator: str, tensor: int, rows: int, kept: Array) -> Array:
        """[stage, first, end] bytes on a device, where stage i keeps kept[i] micro-batches of so many rows."""
        model, runtime = self.problem.model, self.problem.runtime
        activations = self._activation_bytes(accelerator, tensor, rows)
        outputs = rows * self.row_bytes
        outgoing = np.append(outputs[:-1], 0.0)
        per_value = memory.parameter_bytes(model, self.problem.optimizer, runtime.gradient_dtype)
        held = self.held_parameters(tensor) * per_value + runtime.constant_bytes
        held[:, -1] += memory.loss_bytes(self.problem.setting, tensor, rows)
        once = memory.RECEIVED_AHEAD * (outgoing[None, :] + outputs[:, None])
        needed: Array = held + np.round(once + kept[:, None, None] * (spans(activations) + outgoing[None, :]))
        return needed

    def held_parameters(self, tensor: int) -> Array:
        """[first, end] values that a device holds, a weight that several layers share held once."""
        if tensor not in self._held:
            model, setting = self.problem.model, self.problem.setting
            kinds = list(map(model.kind_of, range(len(model.layers))))
            held = spans(np.array([setting.values_at(kind, tensor) for kind in kinds], dtype=float))
            for name in {kind.shared_weight for kind in model.kinds} - {None}:
                named, once = np.zeros_like(held), np.zeros_like(held)
                for owner in reversed([kind for kind in model.kinds if kind.shared_weight == name]):
                    count = np.maximum(spans(np.array([kind is owner for kind in kinds], dtype=float)), 0.0)
                    size = setting.shared_at(owner, tensor)
                    named += count * size
                    once = np.where(count > 0, size, once)
                held -= named - once
            self._held[tensor] = held
        return self._held[tensor]

    def _activation_bytes(self, accelerator: str, tensor: int, rows: int) -> Array:
        """[layer] bytes that one micro-batch keeps."""
        key = (accelerator, tensor, rows)
        if key not in self._activations:
            model, setting = self.problem.model, self.problem.setting
            by_kind = {
                kind.name: setting.layer_cost(accelerator, kind, tensor, rows).activation_bytes for kind in model.kinds
            }
            self._activations[key] = np.array([by_kind[name] for name in model.layers])
        return self._activations[key]
