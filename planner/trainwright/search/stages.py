"""Time and memory of every possible stage, on the devices that would hold it: the tables of the dynamic programme."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import memory
from trainwright.cost.amp import exchange_seconds
from trainwright.cost.compute import layer_sync_seconds
from trainwright.cost.layout import Unit, held_parameters
from trainwright.plan import LayerRun, Schedule
from trainwright.search.degrees import Degrees
from trainwright.search.placement import stage_devices
from trainwright.search.protocol import Problem

Array = NDArray[np.float64]


@dataclass
class StageTables:
    """Tables of one problem; what candidates share is computed once."""

    problem: Problem
    _layers: dict[tuple[str, int, int], tuple[Array, Array]] = field(default_factory=dict)
    _held: dict[int, Array] = field(default_factory=dict)

    def times(self, degrees: Degrees, rows: int) -> Array:
        """[stage, first, end] seconds of one micro-batch, forward and backward, on the stage's slowest device."""
        stages = self._stages(degrees, rows)
        return np.stack([self._stage_times(replicas, degrees.tensor, rows) for replicas in stages])

    def exchanges(self, degrees: Degrees, rows: int) -> Array:
        """[stage, end] seconds of e_i where the pipeline is cut before layer `end` (Eq. 5)."""
        model, stages = self.problem.model, self._stages(degrees, rows)
        size = len(model.layers) + 1
        table = np.zeros((max(degrees.pipeline - 1, 0), size))
        row_bytes = np.array([0.0, *(model.output_bytes_per_row(layer) for layer in range(size - 1))])
        for stage in range(degrees.pipeline - 1):
            table[stage] = row_bytes * exchange_seconds(stages[stage], stages[stage + 1], 1.0, self.problem.cluster)
        return table

    def fits(self, degrees: Degrees, rows: int) -> NDArray[np.bool_]:
        """[stage, first, end] whether every device of the stage has the memory for these layers."""
        model, cluster = self.problem.model, self.problem.cluster
        micro_batches = self.problem.global_batch_size // (rows * degrees.data)
        held = self._held_bytes(degrees.tensor)
        result = np.ones((degrees.pipeline, *held.shape), dtype=np.bool_)
        for stage, replicas in enumerate(self._stages(degrees, rows)):
            kept = memory.in_flight(Schedule.ONE_FORWARD_ONE_BACKWARD, micro_batches, stage, degrees.pipeline)
            sizes = [rows * model.output_bytes_per_row(layer) for layer in range(len(model.layers))]
            outputs = np.array([0, *sizes], dtype=float)
            outgoing = np.where(np.arange(len(outputs)) < len(model.layers), outputs, 0)
            boundary = (kept + memory.RECEIVED_AHEAD) * outgoing[None, :] + memory.RECEIVED_AHEAD * outputs[:, None]
            for accelerator in {cluster.accelerator_of(d) for unit in replicas for d in unit.devices}:
                activations = self._layer_tables(accelerator.name, degrees.tensor, rows)[1]
                needed = held + kept * _spans(activations) + boundary
                needed[:, -1] += memory.LOSS_WORKSPACE * activations[-1]
                result[stage] &= np.round(needed) <= accelerator.memory_bytes
        return result

    def _stages(self, degrees: Degrees, rows: int) -> tuple[tuple[Unit, ...], ...]:
        run = LayerRun(0, 1, degrees.tensor, degrees.data, (rows,) * degrees.data)
        return tuple(
            tuple(
                Unit(stage, replica, group, replica * rows, rows)
                for replica, group in enumerate(run.tensor_groups(devices))
            )
            for stage, devices in enumerate(stage_devices(self.problem.devices, degrees))
        )

    def _stage_times(self, replicas: tuple[Unit, ...], tensor: int, rows: int) -> Array:
        """Slowest device of the stage: its computation, and the tensor all-reduces of the slowest tensor group."""
        model, cluster = self.problem.model, self.problem.cluster
        accelerators = {cluster.accelerator_of(d).name for unit in replicas for d in unit.devices}
        compute = np.max([_spans(self._layer_tables(name, tensor, rows)[0]) for name in accelerators], axis=0)
        syncs = {
            kind.name: 2 * max(layer_sync_seconds(unit, kind, self.problem.setting) for unit in replicas)
            for kind in model.kinds
        }
        seconds: Array = compute + _spans(np.array([syncs[kind] for kind in model.layers]))
        first, end = np.indices(seconds.shape)
        return np.where(end > first, seconds, np.inf)

    def _layer_tables(self, accelerator: str, tensor: int, rows: int) -> tuple[Array, Array]:
        """Seconds (forward and backward) and activation bytes of every layer."""
        key = (accelerator, tensor, rows)
        if key not in self._layers:
            model, setting = self.problem.model, self.problem.setting
            costs = {kind.name: setting.layer_cost(accelerator, kind, tensor, rows) for kind in model.kinds}
            seconds = [costs[kind].forward_seconds + costs[kind].backward_seconds for kind in model.layers]
            activations = [costs[kind].activation_bytes for kind in model.layers]
            self._layers[key] = np.array(seconds), np.array(activations)
        return self._layers[key]

    def _held_bytes(self, tensor: int) -> Array:
        """[first, end] bytes of weights, gradients and optimizer state, a weight that is shared inside held once."""
        if tensor not in self._held:
            model = self.problem.model
            per_value = memory.parameter_bytes(model, self.problem.optimizer)
            layers = len(model.layers)
            held = _spans(
                np.array([model.kind_of(layer).parameters_at(tensor) for layer in range(layers)], dtype=float)
            )
            owners = [layer for layer in range(layers) if model.kind_of(layer).shared_weight is not None]
            for first in range(layers):
                for end in range(first + 2, layers + 1):
                    if sum(first <= owner < end for owner in owners) > 1:
                        held[first, end] = held_parameters(model, first, end, tensor)
            self._held[tensor] = held * per_value
        return self._held[tensor]


def _spans(values: Array) -> Array:
    """[first, end] sums of values[first:end]."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return sums[None, :] - sums[:, None]
