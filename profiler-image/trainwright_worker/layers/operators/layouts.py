"""Layouts of tensors on a mesh of two dimensions, and the steps that convert one into another; without torch.

A layout has one placement for each mesh dimension: the axis that it shards, or one of three without an axis. A tensor's
gradient has the dual layout: sharded like the tensor; equal on all ranks where the tensor is replicated or a partial sum;
and a partial sum where the tensor is copied, since each rank computes one summand of it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from trainwright.operator_shardings import LoopMapping, parse_spec

REPLICATED: Final = -1
"""Placement: all ranks have the tensor, and later its whole gradient."""
COPIED: Final = -2
"""Placement: all ranks have the tensor, and later one summand each of its gradient."""
PARTIAL: Final = -3
"""Placement: each rank has one summand of the tensor."""

Layout = tuple[int, int]
"""Placement on each mesh dimension: the tensor's axis that it shards, or one of the constants above.

An axis that both shard is divided by dimension 0 first: rank (i, j) has part i · n_1 + j.
"""

MeshShape = tuple[int, int]

EVERYWHERE: Final[Layout] = (REPLICATED, REPLICATED)


def read_layout(spec: str, axes: tuple[int | None, ...], mapping: LoopMapping, unsharded: int) -> Layout:
    """Return the layout of a tensor that an operator reads or writes.

    Args:
        spec: sharding of its axes, as in `S0 R S1`.
        axes: axis of the tensor for each axis of the spec; None for one that the tensor does not have.
        mapping: loop of the operator that each mesh dimension shards.
        unsharded: placement where the dimension shards a loop that does not index the tensor: COPIED or PARTIAL.
    """
    sharded = {
        dimension: axis
        for axis, dimensions in zip(axes, parse_spec(spec), strict=True)
        if axis is not None
        for dimension in dimensions
    }
    first, second = (
        sharded.get(dimension, REPLICATED if loop is None else unsharded) for dimension, loop in enumerate(mapping)
    )
    return first, second


def without_sums(layout: Layout) -> Layout:
    """Return which part of a tensor its ranks have, without what is summed: of the tensor, or of its gradient."""
    first, second = (placement if placement >= 0 else REPLICATED for placement in layout)
    return first, second


def along(layout: Layout, *axes: int) -> Layout:
    """Return the layout of a tensor that has only these axes of another one."""
    first, second = (placement if placement in axes else REPLICATED for placement in layout)
    return first, second


def dual(placement: int) -> int:
    """Return the placement of the gradient of a tensor, or of the tensor of a gradient."""
    return {COPIED: PARTIAL, PARTIAL: REPLICATED}.get(placement, placement)


def sharding_dimensions(layout: Layout, axis: int) -> tuple[int, ...]:
    """Return the mesh dimensions that shard an axis."""
    return tuple(dimension for dimension, placement in enumerate(layout) if placement == axis)


def part_of(shape: MeshShape, coordinates: tuple[int, int], layout: Layout, axis: int) -> tuple[int, int]:
    """Return the index of a rank's part of an axis, and the number of parts."""
    index = 0
    dimensions = sharding_dimensions(layout, axis)
    for dimension in dimensions:
        index = index * shape[dimension] + coordinates[dimension]
    return index, math.prod(shape[dimension] for dimension in dimensions)


@dataclass(frozen=True, slots=True)
class Step:
    """Change of the placement on one mesh dimension."""

    dimension: int
    source: int
    target: int

    @property
    def is_message(self) -> bool:
        """Return whether ranks exchange values in the forward."""
        return self.source not in {self.target, REPLICATED}

    def after(self, layout: Layout) -> Layout:
        """Return the layout that it makes of another."""
        return (self.target, layout[1]) if self.dimension == 0 else (layout[0], self.target)

    @property
    def gradient(self) -> Step:
        """Return the step that converts the gradient, in the opposite direction."""
        return Step(self.dimension, dual(self.target), dual(self.source))


@lru_cache(maxsize=4096)
def conversion_steps(shape: MeshShape, sizes: tuple[int, ...], source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps between two layouts that send the fewest bytes forward and backward.

    A step may only begin or end the sharding of an axis on a dimension if no inner dimension shards that axis: parts of it
    would come in another order. `sizes` are those of the whole tensor's axes; a layout on the way may shard only what it
    divides evenly. Raises ValueError if there is no way.
    """
    axes = {placement for placement in (*source, *target) if placement >= 0}
    queue: list[tuple[float, int, Layout, tuple[Step, ...]]] = [(0.0, 0, source, ())]
    reached: set[Layout] = set()
    pushed = 0
    while queue:
        cost, _, layout, steps = heapq.heappop(queue)
        if layout == target:
            return steps
        if layout in reached:
            continue
        reached.add(layout)
        for dimension in (0, 1):
            for placement in (*sorted(axes), REPLICATED, COPIED):
                step = Step(dimension, layout[dimension], placement)
                after = step.after(layout)
                if _is_possible(shape, layout, step) and _is_even(shape, sizes, after):
                    pushed += 1
                    added = _bytes(shape, layout, step) + _bytes(shape, after, step.gradient)
                    heapq.heappush(queue, (cost + added + 1e-6, pushed, after, (*steps, step)))
    raise ValueError(f"no conversion from layout {source} to {target} of a tensor of sizes {sizes} on a mesh {shape}")


def _is_possible(shape: MeshShape, layout: Layout, step: Step) -> bool:
    if step.source in {step.target, COPIED} or shape[step.dimension] == 1:
        return False
    inner = layout[1] if step.dimension == 0 and shape[1] > 1 else REPLICATED
    return inner < 0 or inner not in {step.source, step.target}


def _is_even(shape: MeshShape, sizes: tuple[int, ...], layout: Layout) -> bool:
    return all(
        size % math.prod(shape[dimension] for dimension in sharding_dimensions(layout, axis)) == 0
        for axis, size in enumerate(sizes)
    )


def _bytes(shape: MeshShape, layout: Layout, step: Step) -> float:
    """Return what a rank sends in a step from a layout, as a share of the whole tensor."""
    devices = shape[step.dimension]
    local = math.prod(1 / shape[d] if placement >= 0 else 1.0 for d, placement in enumerate(layout))
    if not step.is_message:
        return 0.0
    if step.source == PARTIAL:
        return (1 if step.target >= 0 else 2) * local * (devices - 1) / devices
    return local * (devices - 1) / devices if step.target >= 0 else local * (devices - 1)
