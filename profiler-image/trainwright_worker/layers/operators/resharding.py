"""Conversion of tensors between layouts on a mesh: autograd functions, one for a step along one mesh dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright_worker.layers.operators.layouts import (
    PARTIAL,
    REPLICATED,
    Layout,
    MeshShape,
    Step,
    conversion_steps,
    part_of,
)
from trainwright_worker.layers.tensor_parallel import Collectives

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Mesh:
    """Ranks of a stage as a rectangle, seen from one of them.

    Attributes:
        coordinates: of this rank.
        groups: of this rank along dimension 0, along dimension 1, and all of them in the order of their coordinates.
    """

    shape: MeshShape
    coordinates: tuple[int, int]
    groups: tuple[Collectives, Collectives, Collectives]

    def group(self, dimensions: tuple[int, ...]) -> Collectives | None:
        """Return the ranks along one dimension or both; None for this rank alone."""
        divided = tuple(dimension for dimension in dimensions if self.shape[dimension] > 1)
        if not divided:
            return None
        return self.groups[2 if len(divided) == 2 else divided[0]]

    def part(self, layout: Layout, axis: int) -> tuple[int, int]:
        """Return the index of this rank's part of an axis, and the number of parts."""
        return part_of(self.shape, self.coordinates, layout, axis)

    def interval(self, layout: Layout, axis: int, size: int) -> tuple[int, int]:
        """Return where this rank's part of an axis starts and stops."""
        index, count = self.part(layout, axis)
        return index * size // count, (index + 1) * size // count

    def own_part(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return a view of this rank's part of a whole tensor."""
        for axis in range(whole.dim()):
            start, stop = self.interval(layout, axis, whole.shape[axis])
            whole = whole.narrow(axis, start, stop - start)
        return whole


def reshard(mesh: Mesh, tensors: Tensors, source: Layout, target: Layout) -> Tensors:
    """Convert tensors that share a layout; what does not change is not touched.

    All ranks of the mesh call it in the same order. Tensors of different widths are converted in the same messages.
    """
    source, target = (without_single_ranks(mesh, layout) for layout in (source, target))
    if source == target:
        return tensors
    whole = [[size * mesh.part(source, axis)[1] for axis, size in enumerate(tensor.shape)] for tensor in tensors]
    sizes = tuple(math.gcd(*own) for own in zip(*whole, strict=True))
    for step in conversion_steps(mesh.shape, sizes, source, target):
        tensors = _Conversion.apply(mesh.groups[step.dimension], step, *tensors)  # type: ignore[no-untyped-call]
    return tensors


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, step: Step, *tensors: Tensor) -> Tensors:
        ctx.group, ctx.step = group, step
        return convert_along(group, step, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *convert_along(ctx.group, ctx.step.gradient, gradients)


def convert_along(group: Collectives, step: Step, tensors: Sequence[Tensor]) -> Tensors:
    """Convert tensors along one mesh dimension, in at most one message."""
    if not step.is_message:
        if step.target < 0:
            return tuple(tensor.view_as(tensor) for tensor in tensors)
        parts = [_parts(tensor, step.target, group.size)[group.index] for tensor in tensors]
        # In their own storage, so that the rest can be freed.
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    if step.source == PARTIAL and step.target < 0:
        return _sum(group, tensors)
    if step.source == PARTIAL:
        parts = [_parts(tensor, step.target, group.size) for tensor in tensors]
        own = group.reduce_scatter(_message(parts))
        pieces = torch.split(own, [part[0].numel() for part in parts])
        return tuple(piece.view(part.shape[1:]) for piece, part in zip(pieces, parts, strict=True))
    if step.target < 0:
        stacked = group.all_gather(_joined([tensor.flatten() for tensor in tensors]))
        shapes = [tensor.shape for tensor in tensors]
    else:
        parts = [_parts(tensor, step.target, group.size) for tensor in tensors]
        stacked = group.all_to_all(_message(parts))
        shapes = [part.shape[1:] for part in parts]
    pieces = torch.split(stacked, [math.prod(shape) for shape in shapes], 1)
    return tuple(
        piece.reshape(group.size, *shape).movedim(0, step.source).flatten(step.source, step.source + 1)
        for piece, shape in zip(pieces, shapes, strict=True)
    )


def _parts(tensor: Tensor, axis: int, count: int) -> Tensor:
    """Return a view of the equal parts of an axis, (count, …)."""
    return torch.unflatten(tensor, axis, (count, -1)).movedim(axis, 0)


def _message(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts of all tensors as (count, values of each part)."""
    return _joined([part.flatten(1) for part in parts])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _sum(group: Collectives, tensors: Sequence[Tensor]) -> Tensors:
    """Return the tensors' sums over the ranks; what is given may have other readers, so it stays."""
    if len(tensors) == 1:
        total = tensors[0].clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return (total,)
    joint = torch.cat([tensor.flatten() for tensor in tensors])
    group.all_reduce(joint)
    pieces = torch.split(joint, [tensor.numel() for tensor in tensors])
    return tuple(piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True))


def without_single_ranks(mesh: Mesh, layout: Layout) -> Layout:
    """Return a layout without placements on dimensions of a single rank."""
    first, second = (placement if size > 1 else REPLICATED for placement, size in zip(layout, mesh.shape, strict=True))
    return first, second
