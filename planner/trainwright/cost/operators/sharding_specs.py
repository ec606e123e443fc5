"""Sharding specs on a logical mesh, and the cost of converting one into another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.loop_nests.operations import Axis
from trainwright.runtime import IDEAL_RINGS, CollectiveRatios


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Devices as a rectangle of shape (n_0, n_1), where all groups along one dimension communicate alike (paper §4.1).

    Attributes:
        accelerators: distinct names; the slowest determines compute seconds.
        latency_seconds: per dimension, of one message (α).
        seconds_per_byte: per dimension (β), while all groups along it communicate at once.
        ratios: per dimension, of measured collectives to rings of these steps.
        exchanges: per dimension, an all-to-all by the bytes on one device; None: as long as a ring's all-gather of them.
        whole: ring over all devices, by which weights are reduced and gathered over both dimensions; None: one after the other.
    """

    accelerators: tuple[str, ...]
    shape: tuple[int, int]
    latency_seconds: tuple[float, float] = (0.0, 0.0)
    seconds_per_byte: tuple[float, float] = (0.0, 0.0)
    ratios: tuple[CollectiveRatios, CollectiveRatios] = (IDEAL_RINGS, IDEAL_RINGS)
    exchanges: tuple[LinearSeconds, LinearSeconds] | None = None
    whole: RingSteps | None = None

    def __post_init__(self) -> None:
        if not self.accelerators or min(self.shape) < 1:
            raise ValueError(f"a mesh needs an accelerator and a shape of at least 1 × 1, got {self}")
        if min(*self.latency_seconds, *self.seconds_per_byte) < 0:
            raise ValueError(f"a mesh's latencies and seconds per byte must be at least 0, got {self}")

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return math.prod(self.shape)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Return the dimensions with more than one device, slowest links first."""
        return tuple(sorted((d for d in (0, 1) if self.shape[d] > 1), key=lambda d: -self.seconds_per_byte[d]))


@dataclass(frozen=True, slots=True)
class RingSteps:
    """Steps of a ring: latency and pace of each, and ratios of measured collectives to them."""

    latency_seconds: float
    seconds_per_byte: float
    ratios: CollectiveRatios = IDEAL_RINGS


@dataclass(frozen=True, slots=True)
class LinearSeconds:
    """Seconds of a message: fixed + per byte × bytes."""

    fixed_seconds: float = 0.0
    seconds_per_byte: float = 0.0

    def __add__(self, other: LinearSeconds) -> LinearSeconds:
        return LinearSeconds(self.fixed_seconds + other.fixed_seconds, self.seconds_per_byte + other.seconds_per_byte)

    def of(self, size_bytes: float) -> float:
        """Return seconds of a message of `size_bytes`."""
        return self.fixed_seconds + self.seconds_per_byte * size_bytes if size_bytes > 0 else 0.0


def all_gather(mesh: LogicalMesh, dimension: int) -> LinearSeconds:
    """Return ring all-gather costs by the final bytes per device."""
    ring = _ring(mesh, dimension)
    return _ring_pass(ring, mesh.shape[dimension], ring.ratios.all_gather)


def all_to_all(mesh: LogicalMesh, dimension: int) -> LinearSeconds:
    """Return all-to-all costs by the bytes on one device, which keeps one of n parts and sends the others."""
    ratio = mesh.ratios[dimension].exchange
    if mesh.exchanges is None:
        return _ring_pass(_ring(mesh, dimension), mesh.shape[dimension], ratio)
    exchange = mesh.exchanges[dimension]
    return LinearSeconds(ratio * exchange.fixed_seconds, ratio * exchange.seconds_per_byte)


def _ring(mesh: LogicalMesh, dimension: int) -> RingSteps:
    return RingSteps(mesh.latency_seconds[dimension], mesh.seconds_per_byte[dimension], mesh.ratios[dimension])


def _ring_pass(ring: RingSteps, devices: int, ratio: float) -> LinearSeconds:
    """Return costs of n - 1 steps of one n-th of the bytes each."""
    steps = devices - 1
    return LinearSeconds(ratio * steps * ring.latency_seconds, ratio * steps / devices * ring.seconds_per_byte)


def reduce_scatter(mesh: LogicalMesh, dimensions: tuple[int, ...]) -> LinearSeconds:
    """Return reduce-scatter costs of gradients over one or both dimensions, by one device's initial bytes."""
    return _of_weights(mesh, dimensions, lambda ratios: ratios.reduce_scatter)


def all_gathers(mesh: LogicalMesh, dimensions: tuple[int, ...]) -> LinearSeconds:
    """Return all-gather costs of weights over one or both dimensions, by one device's final bytes."""
    return _of_weights(mesh, dimensions, lambda ratios: ratios.all_gather)


def all_reduce(mesh: LogicalMesh, dimensions: tuple[int, ...]) -> LinearSeconds:
    """Return costs of an all-reduce: the steps of a reduce-scatter, and of an all-gather over the same links in reverse."""
    half = _ring_passes(mesh, dimensions, lambda ratios: ratios.all_reduce)
    return half + half


_RatioOf = Callable[[CollectiveRatios], float]


def _of_weights(mesh: LogicalMesh, dimensions: tuple[int, ...], ratio_of: _RatioOf) -> LinearSeconds:
    if mesh.whole is not None and set(mesh.dimensions) == {0, 1} == set(dimensions):
        return _ring_pass(mesh.whole, mesh.devices, ratio_of(mesh.whole.ratios))
    return _ring_passes(mesh, dimensions, ratio_of)


def _ring_passes(mesh: LogicalMesh, dimensions: tuple[int, ...], ratio_of: _RatioOf) -> LinearSeconds:
    """Return costs over some dimensions, one after the other; fast links go first, so that slow ones carry less."""
    total, share = LinearSeconds(), 1.0
    for dimension in reversed(mesh.dimensions):
        if dimension in dimensions:
            ring = _ring(mesh, dimension)
            part = _ring_pass(ring, mesh.shape[dimension], ratio_of(ring.ratios))
            total += LinearSeconds(part.fixed_seconds, part.seconds_per_byte * share)
            share /= mesh.shape[dimension]
    return total


Indices = NDArray[np.int64]

AXES = len(Axis)
LAYOUTS = AXES * AXES
"""Number of layouts, numbered AXES × (axis of mesh dimension 0) + (axis of dimension 1)."""


def layout_number(first: int, second: int) -> int:
    """Return the number of a layout, given the axes that mesh dimensions 0 and 1 shard."""
    return first * AXES + second


def divided_axes(number: int) -> tuple[int, int]:
    """Return the axes that mesh dimensions 0 and 1 shard in a layout."""
    return divmod(number, AXES)


@lru_cache(maxsize=64)
def device_shares(shape: tuple[int, int]) -> Array:
    """Return `[layout]` the fraction of a tensor on one device."""
    parts = [[1.0 if axis == Axis.NOTHING else 1.0 / shape[d] for axis in Axis] for d in (0, 1)]
    return np.array([parts[0][first] * parts[1][second] for first in Axis for second in Axis])


class Resharding:
    """Seconds `[source, target]` to convert a tensor between two layouts on one mesh (paper Table 2)."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        costs = [self._cost((_Change(first), _Change(second))) for first in _Change for second in _Change]
        changes = _changes()
        self.fixed_seconds: Array = np.array([cost.fixed_seconds for cost in costs])[changes]
        self.seconds_per_byte: Array = np.array([cost.seconds_per_byte for cost in costs])[changes]
        if min(mesh.shape) > 1:
            _keep_order_of_parts(self)

    def seconds(self, source: Indices, target: Indices, size_bytes: float) -> Array:
        """Return seconds to convert a tensor of `size_bytes` forward and its gradient backward, for arrays of layouts.

        A forward slice is an all-gather backward, and the reverse.
        """
        return self.one_way_seconds(source, target, size_bytes) + self.one_way_seconds(target, source, size_bytes)

    def one_way_seconds(self, source: Indices | int, target: Indices | int, size_bytes: float) -> Array:
        """Return seconds to convert a tensor of `size_bytes`, for layouts or arrays of them."""
        seconds: Array = self.fixed_seconds[source, target] + size_bytes * self.seconds_per_byte[source, target]
        return seconds

    def _cost(self, change: tuple[_Change, _Change]) -> LinearSeconds:
        """Return the cost of one direction, by the bytes of the whole tensor.

        Slices come first: they cost nothing and shrink what follows. All-to-alls come next and all-gathers last, over
        slow links first while the shards are small.
        """
        mesh, total = self.mesh, LinearSeconds()
        parts = [1 if change[d] is _Change.WHOLE else mesh.shape[d] for d in (0, 1)]
        for dimension in mesh.dimensions:
            if change[dimension] is _Change.EXCHANGED:
                part = all_to_all(mesh, dimension)
                total += LinearSeconds(part.fixed_seconds, part.seconds_per_byte / (parts[0] * parts[1]))
        for dimension in mesh.dimensions:
            if change[dimension] is _Change.GATHERED:
                parts[dimension] = 1
                part = all_gather(mesh, dimension)
                total += LinearSeconds(part.fixed_seconds, part.seconds_per_byte / (parts[0] * parts[1]))
        return total


def _keep_order_of_parts(resharding: Resharding) -> None:
    """Correct the costs of conversions that cannot change both mesh dimensions at once, since parts of an axis would be disordered.

    Parts of an axis that both shard are ordered by dimension 0 first, so dimension 0 begins or ends to shard an axis only while
    dimension 1 does not, as in the worker's conversions (`conversion_steps`). Where neither order of the two changes is
    possible, a dimension gathers before and slices after.
    """
    ordered = _ordered_paths()
    each = {message for paths in ordered.values() for path in paths for message in path}
    cost = {message: message.seconds(resharding.mesh) for message in each}
    for pair, paths in ordered.items():
        costs = [
            (sum(cost[m].seconds_per_byte for m in path), sum(cost[m].fixed_seconds for m in path)) for path in paths
        ]
        resharding.seconds_per_byte[pair], resharding.fixed_seconds[pair] = min(costs)


_Axes = tuple[int, int]
"""Axes that mesh dimensions 0 and 1 shard."""


class _Message(NamedTuple):
    """Message of a conversion: a gather or an all-to-all along one mesh dimension.

    Attributes:
        divides: whether dimensions 0 and 1 shard what it moves.
    """

    dimension: int
    gathers: bool
    divides: tuple[bool, bool]

    def seconds(self, mesh: LogicalMesh) -> LinearSeconds:
        """Return its seconds by the bytes of the whole tensor."""
        message = all_gather(mesh, self.dimension) if self.gathers else all_to_all(mesh, self.dimension)
        parts = math.prod(mesh.shape[d] for d in (0, 1) if self.divides[d])
        return LinearSeconds(message.fixed_seconds, message.seconds_per_byte / parts)


@lru_cache(maxsize=1)
def _ordered_paths() -> dict[tuple[int, int], list[list[_Message]]]:
    """Return the messages of each path by source and target, where an axis that one dimension shards before is the other's after, or both's."""
    axes = [divided_axes(layout) for layout in range(LAYOUTS)]
    pairs = [(source, target) for source in range(LAYOUTS) for target in range(LAYOUTS)]
    return {
        (source, target): [_messages(path) for path in _paths(axes[source], axes[target])]
        for source, target in pairs
        if _is_ordered(axes[source], axes[target])
    }


def _is_ordered(source: _Axes, target: _Axes) -> bool:
    changed = [source[dimension] != target[dimension] for dimension in (0, 1)]
    inner = {source[1], target[1]} - {Axis.NOTHING}
    return changed[0] and not inner.isdisjoint({source[0], target[0]})


def _paths(source: _Axes, target: _Axes) -> list[list[_Axes]]:
    """Return the ways between two layouts that change a dimension at a time and keep the order of parts."""
    nothing, ways = int(Axis.NOTHING), []
    for between in (
        [(target[0], source[1])],
        [(source[0], target[1])],
        [(source[0], nothing), (target[0], nothing)],
        [(nothing, source[1]), (nothing, target[1])],
    ):
        way = [source, *between, target]
        if all(map(_keeps_order, way, way[1:])):
            ways.append(way)
    return ways


def _keeps_order(before: _Axes, after: _Axes) -> bool:
    return before[0] == after[0] or before[1] == Axis.NOTHING or before[1] not in {before[0], after[0]}


def _messages(path: Sequence[_Axes]) -> list[_Message]:
    """Return the messages of changes of one dimension each; a slice needs none."""
    messages = []
    for before, after in pairwise(path):
        for dimension in (0, 1):
            source, target = before[dimension], after[dimension]
            if Axis.NOTHING != source != target:
                gathers = target == Axis.NOTHING
                first, second = after if gathers else before
                messages.append(_Message(dimension, gathers, (first != Axis.NOTHING, second != Axis.NOTHING)))
    return messages


class _Change(IntEnum):
    """Change of a tensor along one mesh dimension: still replicated, still sharded, or one of three conversions."""

    WHOLE = 0
    DIVIDED = 1
    SLICED = 2
    EXCHANGED = 3
    GATHERED = 4

    @classmethod
    def between(cls, axis: int, target: int) -> _Change:
        if axis == target:
            return cls.WHOLE if axis == Axis.NOTHING else cls.DIVIDED
        if axis == Axis.NOTHING:
            return cls.SLICED
        return cls.GATHERED if target == Axis.NOTHING else cls.EXCHANGED


@lru_cache(maxsize=1)
def _changes() -> Indices:
    """Return `[source, target]` the number of the pair of changes."""
    change = np.array([[_Change.between(axis, target) for target in Axis] for axis in Axis], dtype=np.int64)
    layouts = np.arange(LAYOUTS)
    first, second = layouts // AXES, layouts % AXES
    changes: Indices = len(_Change) * change[first[:, None], first[None]] + change[second[:, None], second[None]]
    return changes
