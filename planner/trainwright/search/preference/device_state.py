"""Model state on every device under a plan, and the bytes that a device must fetch for another plan.

State survives an iteration: weights, master weights and optimizer state. Gradients do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from trainwright.cluster import Device
from trainwright.cost.context import CostContext
from trainwright.layer import LayerKind
from trainwright.plan import Plan
from trainwright.rank_layout import WHOLE, RankLayout, StateShard


class RunState(NamedTuple):
    """Resident state of the layers `first … end - 1`, which have one strategy."""

    first: int
    end: int
    shard: StateShard


DeviceState = tuple[RunState, ...]
"""State of one device: one entry per layer run of its stage."""
IsSplit = Callable[[int], bool]
"""Predicate: does a tensor group of this degree split the parameters in question?"""


def device_states(plan: Plan) -> dict[Device, DeviceState]:
    """Return the state of every device of the plan."""
    states: dict[Device, DeviceState] = {}
    for stage in plan.stages:
        runs = [(run, RankLayout.of(stage.devices, run)) for run in stage.layers]
        for index, device in enumerate(stage.devices):
            states[device] = tuple(
                RunState(run.first, run.end, layout.shard(index, run.strategy.sharding)) for run, layout in runs
            )
    return states


@dataclass
class MigrationCost:
    """Bytes of state that a device must fetch to change from one state to another, with a cache."""

    context: CostContext
    _cache: dict[tuple[DeviceState, DeviceState], int] = field(default_factory=dict)

    def missing_bytes(self, resident: DeviceState, required: DeviceState) -> int:
        """Return the bytes of `required` that are not in `resident`."""
        key = (resident, required)
        if key not in self._cache:
            total = sum(self._run_bytes(resident, run) for run in required) + self._tied_bytes(resident, required)
            self._cache[key] = round(total)
        return self._cache[key]

    def _run_bytes(self, resident: DeviceState, required: RunState) -> float:
        """Return the bytes missing for a run, without tied weights."""
        total, first = 0.0, required.first
        for run in resident:
            start, end = max(run.first, required.first), min(run.end, required.end)
            if start < end:
                total += self._layer_bytes(first, start, None, required.shard) + self._layer_bytes(
                    start, end, run.shard, required.shard
                )
                first = end
        return total + self._layer_bytes(first, required.end, None, required.shard)

    def _layer_bytes(self, first: int, end: int, resident: StateShard | None, required: StateShard) -> float:
        counts = self.context.kind_counts(first, end)
        return sum(count * self._kind_bytes(kind, resident, required) for kind, count in counts)

    def _kind_bytes(self, kind: LayerKind, resident: StateShard | None, required: StateShard) -> float:
        untied = kind.trained_parameters - (kind.shared_parameters if kind.shared_weight else 0)
        parts: list[tuple[int, IsSplit]] = [(untied, self._is_split(kind))]
        if kind.is_tensor_parallel:
            split = min(kind.split_parameters, untied)
            parts = [(split, lambda _: True), (untied - split, lambda _: False)]
        elif divided := self.context.model.divided_kind(kind):
            split = divided.split_parameters - (kind.shared_parameters if kind.shared_weight else 0)
            parts = [(split, self._is_split(kind)), (untied - split, lambda _: False)]
        total = sum(values * self._missing_bytes_per_value(resident, required, is_split) for values, is_split in parts)
        if kind.frozen_parameters:
            total += kind.frozen_parameters * self._missing_bytes_per_value(
                resident, required, self._is_split(kind), trained=False
            )
        return total

    def _is_split(self, kind: LayerKind) -> IsSplit:
        return partial(self.context.is_tensor_sharded, kind)

    def _tied_bytes(self, resident: DeviceState, required: DeviceState) -> float:
        """Return the bytes missing for tied weights; a device stores each once, with the first of its layers."""
        owners = self._tied_weight_owners(resident)
        total = 0.0
        for name, (kind, shard) in self._tied_weight_owners(required).items():
            _, resident_shard = owners.get(name, (None, None))
            total += kind.shared_parameters * self._missing_bytes_per_value(resident_shard, shard, self._is_split(kind))
        return total

    def _tied_weight_owners(self, device_state: DeviceState) -> dict[str, tuple[LayerKind, StateShard]]:
        owners: dict[str, tuple[LayerKind, StateShard]] = {}
        for run in device_state:
            for kind, _ in self.context.kind_counts(run.first, run.end):
                if kind.shared_weight is not None:
                    owners.setdefault(kind.shared_weight, (kind, run.shard))
        return owners

    def _missing_bytes_per_value(
        self,
        resident: StateShard | None,
        required: StateShard,
        is_split: IsSplit,
        *,
        trained: bool = True,
    ) -> float:
        """Return the bytes that are required but not resident, per parameter of a layer; optimizers have those of trained ones."""
        nothing = (0.0, 0.0)
        resident_intervals = (nothing, nothing) if resident is None else _intervals(resident, is_split)
        total, bytes_of = 0.0, self.context.value_bytes
        for size, (low, high), (start, stop) in zip(
            (bytes_of.weight, trained * bytes_of.optimizer),
            _intervals(required, is_split),
            resident_intervals,
            strict=True,
        ):
            total += size * (high - low - max(min(high, stop) - max(low, start), 0.0))
        return total


def _intervals(shard: StateShard, is_split: IsSplit) -> list[tuple[float, float]]:
    """Return the intervals, within [0, 1], of a layer's parameters whose weights and whose optimizer state a shard has.

    A rank's parameters are laid flat, and replicas take consecutive parts of them.
    """
    part, degree = shard.tensor if is_split(shard.tensor[1]) else WHOLE
    return [
        ((part + replica / count) / degree, (part + (replica + 1) / count) / degree)
        for replica, count in (shard.weights, shard.optimizer)
    ]


def missing_bytes_by_node(old: Plan, new: Plan, context: CostContext) -> dict[str, int]:
    """Return, for each node of the new plan, the bytes of state that its devices must fetch.

    Raises ValueError if the plans are for different models.
    """
    if old.model_layers != new.model_layers:
        raise ValueError(
            f"the plan to keep is for a model of {old.model_layers} layers, but this one has {new.model_layers}"
        )
    migration_cost, old_states = MigrationCost(context), device_states(old)
    missing: Counter[str] = Counter()
    for device, device_state in device_states(new).items():
        missing[device.node] += migration_cost.missing_bytes(old_states.get(device, ()), device_state)
    return missing
