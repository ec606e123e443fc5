"""Seconds that units compute, from the profiles of their own devices, and the tensor all-reduces in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trainwright.cost.collectives import Route, all_reduce_seconds
from trainwright.cost.layout import Unit, repeated_parameters
from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.plan import LayerRun, Stage


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Seconds of one micro-batch on one unit: the slowest member of the tensor group, layer by layer."""

    forward_compute_seconds: float
    forward_sync_seconds: float
    backward_compute_seconds: float
    backward_sync_seconds: float

    @property
    def forward_seconds(self) -> float:
        return self.forward_compute_seconds + self.forward_sync_seconds

    @property
    def backward_seconds(self) -> float:
        return self.backward_compute_seconds + self.backward_sync_seconds


def unit_seconds(unit: Unit, stage: Stage, setting: Setting, *, beside: tuple[Route, ...] = ()) -> UnitSeconds:
    """Seconds of one micro-batch; `beside` are the tensor rings of other units, which run at the same time.

    Recomputed layers run their forward, its all-reduces included, once more before the backward.
    """
    accelerators = {setting.cluster.accelerator_of(device).name for device in unit.devices}
    forward = forward_sync = backward = backward_sync = 0.0
    for run in stage.layers:
        for kind, count in kind_counts(setting.model, run).items():
            costs = [setting.layer_cost(name, kind, run.tensor, unit.rows) for name in accelerators]
            layer_forward = max(cost.forward_seconds for cost in costs)
            sync = layer_sync_seconds(unit, kind, setting, beside=beside)
            forward += count * layer_forward
            forward_sync += count * sync
            backward += count * (max(cost.backward_seconds for cost in costs) + run.recompute * layer_forward)
            backward_sync += count * (1 + run.recompute) * sync
    return UnitSeconds(forward, forward_sync, backward, backward_sync)


def kind_counts(model: Model, run: LayerRun) -> dict[LayerKind, int]:
    """How many layers of each kind the run has."""
    names = Counter(model.layers[run.first : run.first + run.count])
    return {kind: names[kind.name] for kind in model.kinds if kind.name in names}


def layer_sync_seconds(unit: Unit, kind: LayerKind, setting: Setting, *, beside: tuple[Route, ...] = ()) -> float:
    """Seconds of the tensor all-reduces in one forward of a layer (its backward has as many)."""
    if len(unit.devices) == 1 or not kind.is_tensor_parallel or not kind.tensor_all_reduces:
        return 0.0
    message = unit.rows * kind.output_elements_per_row * setting.model.dtype.num_bytes
    return kind.tensor_all_reduces * all_reduce_seconds(unit.devices, message, setting.cluster, beside=beside)


def tensor_rings(stages: tuple[tuple[Unit, ...], ...], setting: Setting) -> dict[Unit, Route]:
    """The ring of every tensor group that leaves its node; in a full pipeline they run at about the same time."""
    rings = {unit: setting.fabric.ring(unit.devices) for units in stages for unit in units if len(unit.devices) > 1}
    return {unit: ring for unit, ring in rings.items() if ring.crossings}


def update_seconds(stage: Stage, accelerator: str, setting: Setting) -> float:
    """Seconds of the optimizer on one rank: every layer's, less what shared weights held once would count twice."""
    tensor, rows = stage.layers[0].tensor, min(stage.layers[0].rows)
    total = 0.0
    parameters = 0
    for run in stage.layers:
        for kind, count in kind_counts(setting.model, run).items():
            total += count * setting.layer_cost(accelerator, kind, run.tensor, rows).update_seconds
            parameters += count * kind.parameters_at(tensor)
    repeated = repeated_parameters(setting.model, stage.first, stage.end)
    return total * (1 - repeated / parameters) if parameters else total
