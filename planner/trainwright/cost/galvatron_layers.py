"""What a layer costs under a strategy, c(l, s), and what a change of strategy costs, R(l, s, s') (Galvatron §IV, §V)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.galvatron_links import ALL_REDUCE, GATHER, GroupLinks, Ring
from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
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


def layout_of(run: LayerRun) -> Layout:
    """What of a strategy decides where rows lie."""
    return run.tensor, run.data, run.order, run.rows


def overlapped_seconds(compute_seconds: float, communication_seconds: float, slowdown_ratio: float) -> float:
    """Both at the same time, each slowed down while the other runs; what is left of the longer one at full speed."""
    shorter, longer = sorted((compute_seconds, communication_seconds))
    return longer + (slowdown_ratio - 1) * shorter


@dataclass
class GroupCosts:
    """Costs on the devices of one stage; the slowest device counts, and the actual links of every group.

    Groups of one kind work at the same time and share the network cards that they cross.

    Attributes:
        exposed_ratio: share of DP's all-reduce that counts behind the last backward, where the runtime sums gradients
            only then; None: it runs beside the backward, as the paper has it.
    """

    devices: tuple[Device, ...]
    setting: Setting
    exposed_ratio: float | None = None
    _rings: dict[tuple[int, int, Order, bool], Ring] = field(default_factory=dict)
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
        backward carries an all-reduce, or is followed by it. CKPT adds a forward, its tensor all-reduces included.
        """
        forward, backward = self._compute_seconds(kind, run)
        tensor_forward, tensor_backward = self._tensor_seconds(kind, run)
        held = self.setting.values_at(kind, run.tensor)
        ring = self._ring(run, data=True)
        gather = sync = behind = 0.0
        gradient_bytes = held * self.setting.gradient_dtype.num_bytes
        if run.sharding is Sharding.ZERO3:
            gather = ring.seconds(held * self.setting.model.dtype.num_bytes, GATHER)
            sync = ring.seconds(gradient_bytes, GATHER)
        elif self.exposed_ratio is None:
            sync = ring.seconds(gradient_bytes, ALL_REDUCE)
        else:
            behind = self.exposed_ratio * ring.seconds(gradient_bytes, ALL_REDUCE)
        slowdown = self.setting.runtime.overlap_slowdown_ratio
        computed = backward + run.recompute * forward
        exposed = forward + tensor_forward + gather + tensor_backward + run.recompute * tensor_forward
        return LayerSeconds(
            exposed + overlapped_seconds(computed, gather, slowdown),
            exposed + overlapped_seconds(computed, gather + sync, slowdown) + behind,
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
            had, needed = self._rows(before), self._rows(after)
            there, back = self._links.move(had, needed), self._links.move(needed, had)
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
        forward = sum(ring.seconds(s.forward_all_reduce_elements_per_row * size, ALL_REDUCE) for s in kind.segments)
        backward = sum(ring.seconds(s.backward_all_reduce_elements_per_row * size, ALL_REDUCE) for s in kind.segments)
        return forward, backward

    def _ring(self, run: LayerRun, *, data: bool) -> Ring:
        key = run.tensor, run.data, run.order, data
        if key not in self._rings:
            grid = np.arange(len(self.devices)).reshape(run.data, run.tensor)
            if run.order is Order.DATA_INNER:
                grid = np.arange(len(self.devices)).reshape(run.tensor, run.data).T
            self._rings[key] = self._links.slowest_ring(grid.T if data else grid)
        return self._rings[key]

    @cached_property
    def _links(self) -> GroupLinks:
        return GroupLinks(self.devices, self.setting)

    def _rows(self, run: LayerRun) -> NDArray[np.intp]:
        """[device, 2] first row and end of what each device computes of a micro-batch."""
        index = np.arange(len(self.devices))
        replica = index // run.tensor if run.order is Order.TENSOR_INNER else index % run.data
        ends = np.cumsum(run.rows)
        return np.stack([ends - run.rows, ends], axis=1)[replica]
