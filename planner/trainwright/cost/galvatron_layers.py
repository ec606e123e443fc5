"""What a layer costs under a strategy, c(l, s), and what a change of strategy costs, R(l, s, s') (Galvatron §IV, §V)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.setting import Setting
from trainwright.layer import Dtype, LayerKind
from trainwright.plan import LayerRun, Order, Sharding

Layout = tuple[int, int, Order, tuple[int, ...]]
"""How a layer's input lies on the devices: tensor and data degree, their order, rows by replica."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """c(l, s) of one micro-batch, forward and backward.

    Attributes:
        steady_seconds: of every micro-batch but the last: without the synchronisation of gradients.
        last_seconds: of the last one, whose backward overlaps it.
    """

    steady_seconds: float
    last_seconds: float


@dataclass(frozen=True, slots=True)
class _Ring:
    """The slowest of rings that run at the same time."""

    members: int
    bytes_per_second: float
    latency_seconds: float

    def seconds(self, message_bytes: float, passes: int) -> float:
        """A gather or a scatter passes the ring once, an all-reduce twice: (n-1)/n of the message each, in n-1 steps."""
        if self.members == 1 or message_bytes <= 0:
            return 0.0
        share = (self.members - 1) / self.members
        return passes * (share * message_bytes / self.bytes_per_second + (self.members - 1) * self.latency_seconds)


_GATHER, _ALL_REDUCE = 1, 2


def layout_of(run: LayerRun) -> Layout:
    """What of a strategy decides where rows lie."""
    return run.tensor, run.data, run.order, run.rows


def overlapped_seconds(compute_seconds: float, communication_seconds: float, slowdown_ratio: float) -> float:
    """Both at the same time, each slowed down while the other runs; what is left of the longer one at full speed."""
    shorter, longer = sorted((compute_seconds, communication_seconds))
    return longer + (slowdown_ratio - 1) * shorter


def gradient_dtype(setting: Setting) -> Dtype:
    """The number format in which gradients are kept and summed."""
    return setting.runtime.gradient_dtype or setting.model.dtype


@dataclass
class GroupCosts:
    """Costs on the devices of one stage; the slowest device counts, and the actual links of every group.

    Groups of one kind work at the same time and share the network cards that they cross.
    """

    devices: tuple[Device, ...]
    setting: Setting
    _rings: dict[tuple[int, int, Order, bool], _Ring] = field(default_factory=dict)
    _moves: dict[tuple[Layout, Layout], tuple[float, float]] = field(default_factory=dict)
    _compute: dict[tuple[str, Layout], tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def accelerators(self) -> tuple[str, ...]:
        """Names of the accelerators of all devices, in their order."""
        return tuple(self.setting.cluster.accelerator_of(device).name for device in self.devices)

    def seconds(self, kind: LayerKind, run: LayerRun) -> LayerSeconds:
        """c(l, s): computation and communication; gradients and sharded weights move while the backward computes.

        Under SDP (zero3) weights are gathered before the forward and during the backward of every micro-batch, and
        gradients reduce-scattered in the last backward. Under DP (and zero1, zero2, which move as much) the last
        backward carries an all-reduce. CKPT adds a forward, its tensor all-reduces included.
        """
        forward, backward = self._compute_seconds(kind, run)
        tensor_forward, tensor_backward = self._tensor_seconds(kind, run)
        held = kind.parameters_at(run.tensor)
        ring = self._ring(run, data=True)
        gather = sync = 0.0
        gradient_bytes = held * gradient_dtype(self.setting).num_bytes
        if run.sharding is Sharding.ZERO3:
            gather = ring.seconds(held * self.setting.model.dtype.num_bytes, _GATHER)
            sync = ring.seconds(gradient_bytes, _GATHER)
        else:
            sync = ring.seconds(gradient_bytes, _ALL_REDUCE)
        slowdown = self.setting.runtime.overlap_slowdown_ratio
        computed = backward + run.recompute * forward
        exposed = forward + tensor_forward + gather + tensor_backward + run.recompute * tensor_forward
        return LayerSeconds(
            exposed + overlapped_seconds(computed, gather, slowdown),
            exposed + overlapped_seconds(computed, gather + sync, slowdown),
        )

    def transformation_seconds(self, row_bytes: float, before: LayerRun, after: LayerRun) -> float:
        """R(l, s, s'): Slice-Gather of a layer's input, its rows of `row_bytes`, and of its gradient on the way back.

        Every device receives what it lacks of its new rows: from its own node where they are there, else over the
        node's card, which the node's devices share.
        """
        latency, seconds_per_byte = self.transformation(before, after)
        return latency + row_bytes * seconds_per_byte

    def transformation(self, before: LayerRun, after: LayerRun) -> tuple[float, float]:
        """R as latency and seconds for each byte of a row."""
        key = layout_of(before), layout_of(after)
        if key[0] == key[1]:
            return 0.0, 0.0
        if key not in self._moves:
            there, back = self._move(before, after), self._move(after, before)
            self._moves[key] = there[0] + back[0], there[1] + back[1]
        return self._moves[key]

    def _compute_seconds(self, kind: LayerKind, run: LayerRun) -> tuple[float, float]:
        """Forward and backward of the slowest device."""
        key = kind.name, layout_of(run)
        if key not in self._compute:
            rows = self._rows(run)
            pairs = sorted({(name, int(high - low)) for name, (low, high) in zip(self.accelerators, rows, strict=True)})
            costs = [self.setting.layer_cost(name, kind, run.tensor, count) for name, count in pairs]
            self._compute[key] = max(c.forward_seconds for c in costs), max(c.backward_seconds for c in costs)
        return self._compute[key]

    def _tensor_seconds(self, kind: LayerKind, run: LayerRun) -> tuple[float, float]:
        """All-reduces of the forward and of the backward, segment by segment."""
        if run.tensor == 1 or not kind.is_tensor_parallel:
            return 0.0, 0.0
        ring = self._ring(run, data=False)
        size = max(run.rows) * self.setting.model.dtype.num_bytes
        forward = sum(ring.seconds(s.forward_all_reduce_elements_per_row * size, _ALL_REDUCE) for s in kind.segments)
        backward = sum(ring.seconds(s.backward_all_reduce_elements_per_row * size, _ALL_REDUCE) for s in kind.segments)
        return forward, backward

    def _ring(self, run: LayerRun, *, data: bool) -> _Ring:
        key = run.tensor, run.data, run.order, data
        if key not in self._rings:
            groups = run.data_groups(self.devices) if data else run.tensor_groups(self.devices)
            self._rings[key] = self._slowest(groups)
        return self._rings[key]

    def _slowest(self, groups: tuple[tuple[Device, ...], ...]) -> _Ring:
        if len(groups[0]) == 1:
            return _Ring(1, np.inf, 0.0)
        fabric = self.setting.fabric
        routes = [fabric.ring(group) for group in groups]
        crossing = sorted((r for r in routes if r.crossings), key=lambda r: (r.crossings, r.alone_bytes_per_second))
        rates = fabric.rates(tuple(crossing)) if crossing else ()
        alone = [route.alone_bytes_per_second for route in routes if not route.crossings]
        return _Ring(len(groups[0]), min((*rates, *alone)), max(route.latency_seconds for route in routes))

    def _rows(self, run: LayerRun) -> NDArray[np.int64]:
        """[device, 2] first row and end of what each device computes of a micro-batch."""
        index = np.arange(len(self.devices))
        replica = index // run.tensor if run.order is Order.TENSOR_INNER else index % run.data
        ends = np.cumsum(run.rows)
        return np.stack([ends - run.rows, ends], axis=1)[replica]

    def _move(self, before: LayerRun, after: LayerRun) -> tuple[float, float]:
        """Latency and seconds for each byte of a row, one way."""
        had, needed = self._rows(before), self._rows(after)
        bounds = np.unique(np.concatenate((had.ravel(), needed.ravel())))
        size, middle = np.diff(bounds), (bounds[:-1] + bounds[1:]) / 2
        has = (had[:, :1] < middle) & (middle < had[:, 1:])
        lacks = (needed[:, :1] < middle) & (middle < needed[:, 1:]) & ~has
        names = [device.node for device in self.devices]
        nodes = list(dict.fromkeys(names))
        node_of = np.array([nodes.index(name) for name in names])
        latency, slowest = 0.0, 0.0
        for number, node in enumerate(nodes):
            here = node_of == number
            near = has[here].any(axis=0)
            inside, outside = (lacks[here] & near) @ size, (lacks[here] & ~near) @ size
            if inside.any():
                link = self.setting.cluster.link(node, node)
                latency = max(latency, link.latency_seconds)
                slowest = max(slowest, float(inside.max()) / self._bandwidth(node, node))
            if outside.any():
                others = [other for other in nodes if other != node]
                latency = max(latency, *(self.setting.cluster.link(other, node).latency_seconds for other in others))
                rate = min(self._bandwidth(other, node) for other in others)
                slowest = max(slowest, float(outside.sum()) / rate)
        return latency, slowest

    def _bandwidth(self, source: str, target: str) -> float:
        return self.setting.fabric.route([(source, target)]).alone_bytes_per_second
