"""Model state on every device under a plan, and the bytes that a device must fetch for another plan.

State survives an iteration: weights, master weights and optimizer state. Gradients do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from trainwright.cluster import Device
from trainwright.cost.context import CostContext
from trainwright.cost.memory import optimizer_bytes
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Plan, RankOrder, Sharding, Stage

ShardIndex = tuple[int, int]
"""(index, number of equal shards); (0, 1) is unsharded."""
Interval = tuple[float, float]
"""Interval of a layer's parameters, within [0, 1]."""
WHOLE: ShardIndex = (0, 1)


@dataclass(frozen=True, slots=True, order=True)
class StateShard:
    """Shard of each layer of a run that is resident on one rank.

    Attributes:
        tensor: shard of the parameters that the tensor group splits.
        weights: further shard of the weights among data replicas.
        optimizer: further shard of the optimizer state among data replicas.
    """

    first: int
    end: int
    tensor: ShardIndex
    weights: ShardIndex
    optimizer: ShardIndex


IsDivided = Callable[[StateShard], bool]
"""Predicate: does the shard's tensor group split the parameters in question?"""
DeviceState = tuple[StateShard, ...]
"""State of one device: one shard per layer run of its stage."""


def device_states(plan: Plan) -> dict[Device, DeviceState]:
    """Return the state of every device of the plan."""
    found: dict[Device, DeviceState] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            found |= zip(stage.devices, _stage_device_states(stage), strict=True)
    return found


def _stage_device_states(stage: Stage) -> Iterator[DeviceState]:
    for index in range(len(stage.devices)):
        yield tuple(_state_shard(run, index) for run in stage.layers)


def _state_shard(run: LayerRun, index: int) -> StateShard:
    if run.order is RankOrder.TENSOR_INNER:
        replica, part = divmod(index, run.tensor)
    else:
        part, replica = divmod(index, run.data)
    replica_index = (replica, run.data) if run.sharding is not Sharding.NONE else WHOLE
    weights = replica_index if run.sharding is Sharding.ZERO3 else WHOLE
    return StateShard(run.first, run.end, (part, run.tensor), weights, replica_index)


@dataclass
class MigrationCost:
    """Bytes of state that a device must fetch to change from one state to another, with a cache."""

    setting: CostContext
    _cache: dict[tuple[DeviceState, DeviceState], int] = field(default_factory=dict)

    def missing_bytes(self, resident: DeviceState, required: DeviceState) -> int:
        """Return the bytes of `required` that are not in `resident`."""
        key = (resident, required)
        if key not in self._cache:
            total = sum(self._run_bytes(resident, share) for share in required) + self._tied_bytes(resident, required)
            self._cache[key] = round(total)
        return self._cache[key]

    @cached_property
    def _bytes_per_value(self) -> tuple[int, int]:
        """Bytes per parameter of weights, and of optimizer state with the master weight."""
        model = self.setting.model
        return model.dtype.num_bytes, optimizer_bytes(model, self.setting.optimizer)

    def _run_bytes(self, resident: DeviceState, required: StateShard) -> float:
        """Return the bytes missing for a run, without tied weights."""
        total, first = 0.0, required.first
        for share in resident:
            start, end = max(share.first, required.first), min(share.end, required.end)
            if start < end:
                total += self._layer_bytes(first, start, None, required) + self._layer_bytes(
                    start, end, share, required
                )
                first = end
        return total + self._layer_bytes(first, required.end, None, required)

    def _layer_bytes(self, first: int, end: int, resident: StateShard | None, required: StateShard) -> float:
        if first >= end:
            return 0.0
        counts = self.setting.kind_counts(first, end)
        return sum(count * self._kind_bytes(kind, resident, required) for kind, count in counts)

    def _kind_bytes(self, kind: LayerKind, resident: StateShard | None, required: StateShard) -> float:
        untied = kind.parameters - (kind.shared_parameters if kind.shared_weight else 0)
        if not kind.is_tensor_parallel:
            return untied * self._missing_bytes_per_value(
                resident, required, lambda share: self.setting.is_tensor_sharded(kind, share.tensor[1])
            )
        split = min(kind.split_parameters, untied)
        return split * self._missing_bytes_per_value(resident, required, lambda _: True) + (
            untied - split
        ) * self._missing_bytes_per_value(resident, required, lambda _: False)

    def _tied_bytes(self, resident: DeviceState, required: DeviceState) -> float:
        """Return the bytes missing for tied weights; a device stores each once, with the first of its layers."""
        owners = self._tied_weight_owners(resident)
        total = 0.0
        for name, (kind, share) in self._tied_weight_owners(required).items():
            resident_owner = owners.get(name)
            total += kind.shared_parameters * self._missing_bytes_per_value(
                resident_owner and resident_owner[1],
                share,
                lambda one, kind=kind: self.setting.is_tensor_sharded(kind, one.tensor[1]),  # type: ignore[misc]
            )
        return total

    def _tied_weight_owners(self, device_state: DeviceState) -> dict[str, tuple[LayerKind, StateShard]]:
        found: dict[str, tuple[LayerKind, StateShard]] = {}
        for share in device_state:
            for kind, _ in self.setting.kind_counts(share.first, share.end):
                if kind.shared_weight is not None:
                    found.setdefault(kind.shared_weight, (kind, share))
        return found

    def _missing_bytes_per_value(
        self, resident: StateShard | None, required: StateShard, is_divided: IsDivided
    ) -> float:
        """Return the bytes that are required but not resident, per parameter of a layer."""
        weight, optimizer = self._bytes_per_value
        total = 0.0
        for size, part_of in ((weight, _weights), (optimizer, _optimizer)):
            required_interval = _interval(required.tensor if is_divided(required) else WHOLE, part_of(required))
            resident_interval = (
                (0.0, 0.0)
                if resident is None
                else _interval(resident.tensor if is_divided(resident) else WHOLE, part_of(resident))
            )
            common = max(
                min(required_interval[1], resident_interval[1]) - max(required_interval[0], resident_interval[0]), 0.0
            )
            total += size * (required_interval[1] - required_interval[0] - common)
        return total


def _weights(share: StateShard) -> ShardIndex:
    return share.weights


def _optimizer(share: StateShard) -> ShardIndex:
    return share.optimizer


def _interval(tensor: ShardIndex, shard: ShardIndex) -> Interval:
    """Return the interval of a shard: a rank's parameters are laid flat, and replicas take consecutive parts of them."""
    part, degree = tensor
    replica, replica_count = shard
    return (part + replica / replica_count) / degree, (part + (replica + 1) / replica_count) / degree


def missing_bytes_by_node(old: Plan, new: Plan, setting: CostContext) -> dict[str, int]:
    """Return, for each node of the new plan, the bytes of state that its devices must fetch.

    Raises ValueError if the plans are for different models.
    """
    if old.model_layers != new.model_layers:
        raise ValueError(
            f"the plan to keep is for a model of {old.model_layers} layers, but this one has {new.model_layers}"
        )
    migration_cost, old_states = MigrationCost(setting), device_states(old)
    found: dict[str, int] = defaultdict(int)
    for device, device_state in device_states(new).items():
        found[device.node] += migration_cost.missing_bytes(old_states.get(device, ()), device_state)
    return dict(found)
