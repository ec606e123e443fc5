"""What every device holds of a model's state under a plan, and what of it another plan would make it newly hold.

State is what survives an iteration: weights, master weights and the optimizer's. Gradients are not moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from trainwright.cluster import Device
from trainwright.cost.memory import optimizer_bytes
from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Order, Plan, Sharding, Stage

Part = tuple[int, int]
"""Which part of how many equal ones: (0, 1) is the whole."""
Interval = tuple[float, float]
"""Of a layer's values, from 0 to 1."""
WHOLE: Part = (0, 1)


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """What one rank holds of each layer of a run.

    Attributes:
        tensor: its part of the values that the tensor group divides.
        weights, optimizer: its part of that, as far as sharding divides it among the data replicas.
    """

    first: int
    end: int
    tensor: Part
    weights: Part
    optimizer: Part


Divided = Callable[[Share], bool]
"""Whether the tensor group of a share divides the values in question."""
Seat = tuple[Share, ...]
"""What one device holds: a share for every layer run of its stage."""


def seats(plan: Plan) -> dict[Device, Seat]:
    """What every device of the plan holds."""
    found: dict[Device, Seat] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            found |= zip(stage.devices, _seats_of(stage), strict=True)
    return found


def _seats_of(stage: Stage) -> Iterator[Seat]:
    for index in range(len(stage.devices)):
        yield tuple(_share(run, index) for run in stage.layers)


def _share(run: LayerRun, index: int) -> Share:
    if run.order is Order.TENSOR_INNER:
        replica, part = divmod(index, run.tensor)
    else:
        part, replica = divmod(index, run.data)
    among = (replica, run.data) if run.sharding is not Sharding.NONE else WHOLE
    weights = among if run.sharding is Sharding.ZERO3 else WHOLE
    return Share(run.first, run.end, (part, run.tensor), weights, among)


@dataclass
class Moves:
    """Bytes of state that a device must newly hold to change from one seat to another; what was asked is remembered."""

    setting: Setting
    _found: dict[tuple[Seat, Seat], int] = field(default_factory=dict)

    def new_bytes(self, held: Seat, needed: Seat) -> int:
        """Bytes of `needed` that are not in `held`; an empty seat holds nothing."""
        key = (held, needed)
        if key not in self._found:
            total = sum(self._of_share(held, share) for share in needed) + self._of_shared(held, needed)
            self._found[key] = round(total)
        return self._found[key]

    @cached_property
    def _bytes_per_value(self) -> tuple[int, int]:
        """Of a weight, and of the optimizer's state with the master weight."""
        model = self.setting.model
        return model.dtype.num_bytes, optimizer_bytes(model, self.setting.optimizer)

    def _of_share(self, held: Seat, needed: Share) -> float:
        """Bytes for a run, weights that several layers share left out."""
        total, first = 0.0, needed.first
        for share in held:
            start, end = max(share.first, needed.first), min(share.end, needed.end)
            if start < end:
                total += self._of_layers(first, start, None, needed) + self._of_layers(start, end, share, needed)
                first = end
        return total + self._of_layers(first, needed.end, None, needed)

    def _of_layers(self, first: int, end: int, held: Share | None, needed: Share) -> float:
        if first >= end:
            return 0.0
        counts = self.setting.kind_counts(first, end)
        return sum(count * self._of_kind(kind, held, needed) for kind, count in counts)

    def _of_kind(self, kind: LayerKind, held: Share | None, needed: Share) -> float:
        own = kind.parameters - (kind.shared_parameters if kind.shared_weight else 0)
        if not kind.is_tensor_parallel:
            return own * self._fresh(held, needed, lambda share: self.setting.divides(kind, share.tensor[1]))
        split = min(kind.split_parameters, own)
        return split * self._fresh(held, needed, lambda _: True) + (own - split) * self._fresh(
            held, needed, lambda _: False
        )

    def _of_shared(self, held: Seat, needed: Seat) -> float:
        """Bytes for weights that several layers share: a device holds each once, with the first of its layers."""
        owners = self._owners(held)
        total = 0.0
        for name, (kind, share) in self._owners(needed).items():
            before = owners.get(name)
            total += kind.shared_parameters * self._fresh(
                before and before[1],
                share,
                lambda one, kind=kind: self.setting.divides(kind, one.tensor[1]),  # type: ignore[misc]
            )
        return total

    def _owners(self, seat: Seat) -> dict[str, tuple[LayerKind, Share]]:
        found: dict[str, tuple[LayerKind, Share]] = {}
        for share in seat:
            for kind, _ in self.setting.kind_counts(share.first, share.end):
                if kind.shared_weight is not None:
                    found.setdefault(kind.shared_weight, (kind, share))
        return found

    def _fresh(self, held: Share | None, needed: Share, divided: Divided) -> float:
        """Bytes, for each value of a layer, of what is needed and not held."""
        weight, optimizer = self._bytes_per_value
        total = 0.0
        for size, part_of in ((weight, _weights), (optimizer, _optimizer)):
            wanted = _interval(needed.tensor if divided(needed) else WHOLE, part_of(needed))
            here = (0.0, 0.0) if held is None else _interval(held.tensor if divided(held) else WHOLE, part_of(held))
            common = max(min(wanted[1], here[1]) - max(wanted[0], here[0]), 0.0)
            total += size * (wanted[1] - wanted[0] - common)
        return total


def _weights(share: Share) -> Part:
    return share.weights


def _optimizer(share: Share) -> Part:
    return share.optimizer


def _interval(tensor: Part, shard: Part) -> Interval:
    """A shard is a stretch of the rank's values: they are laid flat, and each replica takes the next of them."""
    part, degree = tensor
    replica, among = shard
    return (part + replica / among) / degree, (part + (replica + 1) / among) / degree


def by_node(old: Plan, new: Plan, setting: Setting) -> dict[str, int]:
    """By node of the new plan: bytes of state that its devices must newly hold.

    Raises ValueError where the plans are for different models.
    """
    if old.model_layers != new.model_layers:
        raise ValueError(
            f"the plan to keep is for a model of {old.model_layers} layers, but this one has {new.model_layers}"
        )
    moves, before = Moves(setting), seats(old)
    found: dict[str, int] = defaultdict(int)
    for device, seat in seats(new).items():
        found[device.node] += moves.new_bytes(before.get(device, ()), seat)
    return dict(found)
