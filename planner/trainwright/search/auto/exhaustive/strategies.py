"""Sharding and recompute of every layer of a stage: which may fit, and what the stage takes with them at least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.memory import boundary_bytes, loss_bytes, optimizer_bytes
from trainwright.cost.setting import Setting
from trainwright.plan import Sharding
from trainwright.search.auto.exhaustive.shapes import Shapes, StageShape

Array = NDArray[np.float64]
Choices = tuple[tuple[Sharding, bool], ...]
"""By layer of a stage."""

_ROUNDING_BYTES = 8
_SHARDINGS = tuple(Sharding)
_NONE, _ZERO1, _ZERO2, _ZERO3 = range(4)


@dataclass(frozen=True)
class Surroundings:
    """What a stage's strategies meet outside of it.

    Attributes:
        end_seconds: no worker of the stage ends earlier where nothing is sharded or computed again.
        start_seconds: the stage begins no earlier.
        micro_batches, kept: of the pipeline, and in flight at the stage.
        several: whether gradients are summed over several pipelines.
        across_per_byte: seconds per byte of a sum over pipelines, at least.
    """

    end_seconds: float
    start_seconds: float
    micro_batches: int
    kept: int
    several: bool
    across_per_byte: float


@dataclass(frozen=True)
class Strategies:
    """Choices that may fit, by what the stage then takes at least."""

    bounds: tuple[float, ...]
    choices: tuple[Choices, ...]


def strategies(shape: StageShape, around: Surroundings, shapes: Shapes, cutoff: float) -> Strategies:
    """Those whose bound lies below the cutoff and whose least memory every device has."""
    layers = shape.end - shape.first
    kinds = 4 if len(shape.rows) > 1 else 1
    digits = np.indices((2 * kinds,) * layers).reshape(layers, -1).T
    sharding, again = digits % kinds, digits >= kinds
    table = _Table(shape, around, shapes)
    bounds = table.bounds(sharding, again)
    kept = np.flatnonzero((bounds < cutoff) & table.may_fit(sharding, again))
    kept = kept[np.lexsort((digits[kept].sum(axis=1), bounds[kept]))]
    return Strategies(
        tuple(bounds[kept].tolist()),
        tuple(tuple((_SHARDINGS[s], bool(r)) for s, r in zip(sharding[row], again[row], strict=True)) for row in kept),
    )


class _Table:
    """Seconds and bytes of a stage's layers, layer by layer: sums of them are never too high."""

    def __init__(self, shape: StageShape, around: Surroundings, shapes: Shapes) -> None:
        self.shape, self.around, self.shapes = shape, around, shapes
        self.setting: Setting = shapes.problem.setting
        self.layers = range(shape.first, shape.end)
        self.kinds = [self.setting.model.kind_of(layer) for layer in self.layers]
        self.data = len(shape.rows)
        own = []
        for kind in self.kinds:
            shared = self.setting.shared_at(kind, shape.tensor) if kind.shared_weight else 0
            own.append(self.setting.values_at(kind, shape.tensor) - shared)
        self.own_values = np.array(own, dtype=np.float64)
        """Values that are no other layer's."""

    def bounds(self, sharding: NDArray[np.intp], again: NDArray[np.bool_]) -> Array:
        """[choice] seconds of the iteration at least."""
        around, data = self.around, self.data
        setting = self.setting
        slow = min(setting.runtime.overlap_slowdown_ratio - 1, 1.0)
        per_byte = self._per_byte()
        reduced = self.own_values * setting.gradient_dtype.num_bytes * per_byte
        gathered = self.own_values * setting.model.dtype.num_bytes * per_byte / 2
        meanwhile = setting.runtime.overlaps_gradients
        last, behind = np.zeros((4, len(reduced))), np.zeros((4, len(reduced)))
        last[_ZERO2] = last[_ZERO3] = slow * reduced / 2
        (last if meanwhile else behind)[_ZERO1] = (slow if meanwhile else 1.0) * reduced / 2
        behind[_ZERO1] += gathered
        behind[_ZERO2] += gathered
        each = np.zeros((4, len(reduced)))
        each[_ZERO3] = slow * gathered
        across = self.own_values * setting.gradient_dtype.num_bytes * around.across_per_byte
        if around.several:
            behind += across / data
        elif meanwhile:
            last[_NONE] = slow * reduced
        else:
            behind[_NONE] += reduced
        update = np.array([self.shapes.update(layer, self.shape) for layer in self.layers])
        behind[_NONE] += update
        behind[1:] += update / data
        size, place = self.shape.tensor, np.arange(len(reduced))
        nodes = [device.node for device in self.shape.devices]
        best = np.zeros(len(sharding))
        shared_out: Array = behind[sharding, place].sum(axis=1)
        last_more = last[sharding, place].sum(axis=1)
        least_forward = np.full(len(reduced), np.inf)
        gather = each[sharding, place].sum(axis=1)
        for replica, rows in enumerate(self.shape.rows):
            members = tuple(nodes[replica * size : (replica + 1) * size])
            found = np.array([self.shapes.layer(layer, members, rows) for layer in self.layers])
            least_forward = np.minimum(least_forward, found[:, 0])
            both = found.sum() + again @ found[:, 0] + 2 * gather
            best = np.maximum(best, around.start_seconds + around.micro_batches * both + last_more + shared_out)
        ended = around.end_seconds + again @ least_forward + gather + last_more + shared_out
        longest: Array = np.maximum(best, ended) + setting.runtime.constant_seconds
        return longest * (1 - 1e-9)

    def _per_byte(self) -> float:
        """Of an all-reduce over a data group, the slowest of them."""
        if self.data == 1:
            return 0.0
        nodes, size = [device.node for device in self.shape.devices], self.shape.tensor
        groups = tuple(tuple(nodes[index::size]) for index in range(size))
        return min(way.seconds_per_byte for way in self.setting.collectives.all_reduce(groups).ways)

    def may_fit(self, sharding: NDArray[np.intp], again: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[choice] whether the least that each device holds is not above what it has."""
        setting, around, shape = self.setting, self.around, self.shape
        model, data = setting.model, self.data
        seen: set[str] = set()
        values = self.own_values.copy()
        for place, kind in enumerate(self.kinds):
            if kind.shared_weight and kind.shared_weight not in seen:
                seen.add(kind.shared_weight)
                values[place] += setting.shared_at(kind, shape.tensor)
        parts = values / data
        weights, gradients = np.tile(values, (4, 1)), np.tile(values, (4, 1))
        state = np.tile(parts, (4, 1))
        state[_NONE], weights[_ZERO3] = values, parts
        if around.micro_batches == 1:
            gradients[_ZERO2] = gradients[_ZERO3] = parts
        held = weights * model.dtype.num_bytes + gradients * setting.gradient_dtype.num_bytes
        held += state * (optimizer_bytes(model, setting.optimizer))
        total = held[sharding, np.arange(len(values))].sum(axis=1)
        fits = np.ones(len(sharding), dtype=np.bool_)
        for number, device in enumerate(shape.devices):
            rows = shape.rows[number // shape.tensor]
            name = setting.accelerator_of_node[device.node]
            kept = np.array(
                [setting.layer_cost(name, kind, shape.tensor, rows).activation_bytes for kind in self.kinds]
            )
            inputs = np.array([model.output_bytes_per_row(layer - 1) if layer else 0 for layer in self.layers]) * rows
            used = around.kept * (np.where(again, inputs, kept).sum(axis=1)) + (again * kept).max(axis=1)
            used += boundary_bytes(model, shape.first, shape.end, (rows, rows), around.kept)
            if shape.end == len(model.layers):
                used += loss_bytes(setting, shape.tensor, rows)
            used += setting.runtime.constant_bytes - _ROUNDING_BYTES
            fits &= total + used <= setting.memory_of_node[device.node]
        return fits
