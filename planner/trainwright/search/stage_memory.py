"""Memory of every possible span of layers as a stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Accelerator
from trainwright.cost import memory
from trainwright.search.problem import Problem
from trainwright.search.spans import Array, span_sums


@dataclass
class StageMemory:
    """Memory of all stages of a problem, with caches that candidates share."""

    problem: Problem
    _resident: dict[int, Array] = field(default_factory=dict)
    _activations: dict[tuple[str, int, int], Array] = field(default_factory=dict)
    _fits: dict[tuple[str, int, int, tuple[int, ...]], NDArray[np.bool_]] = field(default_factory=dict)

    @cached_property
    def row_bytes(self) -> Array:
        """`[end]` bytes per row of the boundary before layer `end`."""
        model = self.problem.model
        return np.array([0.0, *(model.output_bytes_per_row(layer) for layer in range(len(model.layers)))])

    def fits(self, accelerator: Accelerator, tensor: int, rows: int, in_flight: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return `[stage, first, end]` whether the device has the memory, with `in_flight[stage]` micro-batches in flight."""
        key = (accelerator.name, tensor, rows, in_flight)
        if key not in self._fits:
            needed = self.required_bytes(accelerator.name, tensor, rows, np.array(in_flight, dtype=float))
            self._fits[key] = needed <= accelerator.memory_bytes
        return self._fits[key]

    def required_bytes(self, accelerator: str, tensor: int, rows: int, in_flight: Array) -> Array:
        """Return `[stage, first, end]` bytes on a device.

        `in_flight[stage]` micro-batches are in flight, each with `rows` rows.
        """
        model, runtime = self.problem.model, self.problem.runtime
        activations = self._activation_bytes(accelerator, tensor, rows)
        outputs = rows * self.row_bytes
        outgoing = np.append(outputs[:-1], 0.0)
        per_value = memory.parameter_bytes(model, self.problem.optimizer, runtime.gradient_dtype)
        resident = self.resident_parameters(tensor) * per_value + runtime.constant_bytes
        resident[:, -1] += memory.loss_bytes(self.problem.cost_context, tensor, rows)
        prefetched = memory.PREFETCHED_BOUNDARIES * (outgoing[None, :] + outputs[:, None])
        needed: Array = resident + np.round(
            prefetched + in_flight[:, None, None] * (span_sums(activations) + outgoing[None, :])
        )
        return needed

    def resident_parameters(self, tensor: int) -> Array:
        """Return `[first, end]` parameters resident on a device; a tied weight counts once."""
        if tensor not in self._resident:
            model, setting = self.problem.model, self.problem.cost_context
            kinds = list(map(model.kind_of, range(len(model.layers))))
            resident = span_sums(np.array([setting.parameters_per_rank(kind, tensor) for kind in kinds], dtype=float))
            for name in {kind.shared_weight for kind in model.kinds} - {None}:
                all_copies, one_copy = np.zeros_like(resident), np.zeros_like(resident)
                for owner in reversed([kind for kind in model.kinds if kind.shared_weight == name]):
                    count = np.maximum(span_sums(np.array([kind is owner for kind in kinds], dtype=float)), 0.0)
                    size = setting.tied_parameters_per_rank(owner, tensor)
                    all_copies += count * size
                    one_copy = np.where(count > 0, size, one_copy)
                resident -= all_copies - one_copy
            self._resident[tensor] = resident
        return self._resident[tensor]

    def _activation_bytes(self, accelerator: str, tensor: int, rows: int) -> Array:
        """Return `[layer]` activation bytes that one micro-batch saves."""
        key = (accelerator, tensor, rows)
        if key not in self._activations:
            model, setting = self.problem.model, self.problem.cost_context
            by_kind = {
                kind.name: setting.layer_cost(accelerator, kind, tensor, rows).activation_bytes for kind in model.kinds
            }
            self._activations[key] = np.array([by_kind[name] for name in model.layers])
        return self._activations[key]
