"""Pairs of a token and one of its experts on a mesh, and the conversion of their values between layouts.

Values of pairs are tensors (pairs, width). A rank has the pairs of its rows, positions and experts, as the layout says, by
expert and then by token. Every rank knows the choices of all whose pairs it may get, so it counts by itself what each sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from trainwright_worker.layers.operators.layouts import PARTIAL, Layout, Step, conversion_steps, part_of
from trainwright_worker.layers.operators.operator_tensors import POSITIONS, ROWS, WIDTH, Value
from trainwright_worker.layers.operators.resharding import Mesh, Tensors, convert_along, without_single_ranks

EXPERTS: Final = 3
"""Axis of a layout of pairs, (rows, positions, width, experts)."""
SELECTING: Final = (ROWS, POSITIONS, EXPERTS)
"""Axes that select pairs."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of some rows and positions, by expert and then by token; index tensors lie on the CPU.

    Attributes:
        sizes: rows, positions and experts of all of them, by axis.
        axes: each pair's row, position and expert, by axis.
        choices: which of its token's choices each pair is.
    """

    mesh: Mesh
    sizes: dict[int, int]
    axes: dict[int, Tensor]
    choices: Tensor
    _selected: dict[tuple[Layout, tuple[int, int]], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, experts: Tensor, layout: Layout, count: int) -> Pairs:
        """Return the pairs of choices (rows, positions, k) in a layout, of `count` experts.

        The host waits here until the GPU has chosen: messages have sizes that the host states.
        """
        chosen, (rows, positions, per_token) = experts.cpu().long(), experts.shape
        by_expert, order = chosen.flatten().sort(stable=True)
        tokens = order // per_token
        row_part, row_parts = mesh.part(layout, ROWS)
        position_part, position_parts = mesh.part(layout, POSITIONS)
        axes = {
            ROWS: tokens // positions + row_part * rows,
            POSITIONS: tokens % positions + position_part * positions,
            EXPERTS: by_expert,
        }
        sizes = {ROWS: rows * row_parts, POSITIONS: positions * position_parts, EXPERTS: count}
        return cls(mesh, sizes, axes, order % per_token)

    def selected(self, layout: Layout, coordinates: tuple[int, int] | None = None) -> Tensor:
        """Return which pairs the rank of some coordinates has, ascending; this rank by default."""
        place = self.mesh.coordinates if coordinates is None else coordinates
        first, second = (placement if placement in SELECTING else PARTIAL for placement in layout)
        key = (first, second), place
        if key not in self._selected:
            self._selected[key] = self._mask(layout, place).nonzero().flatten()
        return self._selected[key]

    def _mask(self, layout: Layout, coordinates: tuple[int, int]) -> Tensor:
        """Return whether the rank of some coordinates has each pair."""
        mask = torch.ones(len(self.choices), dtype=torch.bool)
        for axis in SELECTING:
            index, count = part_of(self.mesh.shape, coordinates, layout, axis)
            if count > 1:
                size, values = self.sizes[axis], self.axes[axis]
                mask &= (values >= index * size // count) & (values < (index + 1) * size // count)
        return mask

    def places(self, layout: Layout) -> Tensor:
        """Return the place of each of this rank's pairs among its tokens (rows × positions, of its parts)."""
        own = self.selected(layout)
        first_row, _ = self.mesh.interval(layout, ROWS, self.sizes[ROWS])
        start, stop = self.mesh.interval(layout, POSITIONS, self.sizes[POSITIONS])
        return (self.axes[ROWS][own] - first_row) * (stop - start) + self.axes[POSITIONS][own] - start

    def group_sizes(self, layout: Layout) -> list[int]:
        """Return the number of this rank's pairs of each of its experts."""
        first, stop = self.mesh.interval(layout, EXPERTS, self.sizes[EXPERTS])
        own: list[int] = torch.bincount(
            self.axes[EXPERTS][self.selected(layout)] - first, minlength=stop - first
        ).tolist()
        return own

    def converted(self, tensors: Tensors, source: Layout, target: Layout) -> Tensors:
        """Convert values of pairs; all ranks of the mesh call it in the same order."""
        source, target = (without_single_ranks(self.mesh, layout) for layout in (source, target))
        width = math.gcd(*(tensor.shape[1] for tensor in tensors)) * self.mesh.part(source, WIDTH)[1]
        sizes = self.sizes[ROWS], self.sizes[POSITIONS], width, self.sizes[EXPERTS]
        for step in conversion_steps(self.mesh.shape, sizes, source, target):
            after = step.after(source)
            tensors = _Conversion.apply(self, step, (source, after), *tensors)  # type: ignore[no-untyped-call]
            source = after
        return tensors

    def along(self, dimension: int, index: int) -> tuple[int, int]:
        """Return the coordinates of a rank on this rank's line."""
        first, second = self.mesh.coordinates
        return (index, second) if dimension == 0 else (first, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairValue(Value):
    """Value of pairs."""

    pairs: Pairs

    def converted(self, mesh: Mesh, layout: Layout) -> Tensors:
        del mesh  # that of the pairs
        return self.pairs.converted(self.tensors, self.layout, layout)


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Pairs, step: Step, layouts: tuple[Layout, Layout], *tensors: Tensor) -> Tensors:
        ctx.pairs, ctx.step, ctx.layouts = pairs, step, layouts
        return _convert(pairs, step, layouts, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        before, after = ctx.layouts
        return None, None, None, *_convert(ctx.pairs, ctx.step.gradient, (after, before), gradients)


def _convert(pairs: Pairs, step: Step, layouts: tuple[Layout, Layout], tensors: Sequence[Tensor]) -> Tensors:
    """Convert values of pairs along one mesh dimension; of the layouts around it, only what selects pairs counts."""
    if step.source not in SELECTING and step.target not in SELECTING:
        source, target = (1 if placement == WIDTH else placement for placement in (step.source, step.target))
        return convert_along(pairs.mesh.groups[step.dimension], Step(step.dimension, source, target), tensors)
    before, after = layouts
    own, later = pairs.selected(before), pairs.selected(after)
    if not step.is_message:
        kept = _shared(own, later).to(tensors[0].device)
        return tuple(tensor.index_select(0, kept) for tensor in tensors)
    return _exchange(pairs, step, layouts, tensors)


def _exchange(pairs: Pairs, step: Step, layouts: tuple[Layout, Layout], tensors: Sequence[Tensor]) -> Tensors:
    """Send every rank of the line what it needs of this rank's pairs, and put together what comes."""
    (before, after), group = layouts, pairs.mesh.groups[step.dimension]
    own, later, device = pairs.selected(before), pairs.selected(after), tensors[0].device
    ranks = [pairs.along(step.dimension, index) for index in range(group.size)]
    leaving = [_shared(own, pairs.selected(after, rank)) for rank in ranks]
    coming = [_shared(later, pairs.selected(before, rank)) for rank in ranks]
    divisor = group.size if step.target == WIDTH else 1
    widths = [tensor.shape[1] // divisor for tensor in tensors]
    parts = [torch.cat(part, 1) for part in zip(*(tensor.chunk(divisor, 1) for tensor in tensors), strict=True)]
    by_rank = parts if step.target == WIDTH else parts * group.size
    message = torch.cat(
        [part.index_select(0, rows.to(device)).flatten() for part, rows in zip(by_rank, leaving, strict=True)]
    )
    sent, received = ([len(rows) * sum(widths) for rows in each] for each in (leaving, coming))
    came = group.exchange(message, sent, received).view(-1, sum(widths))
    if step.source == PARTIAL:
        came = torch.unflatten(came, 0, (group.size, -1)).sum(0)
    elif step.source == WIDTH:
        slices = torch.unflatten(came, 0, (group.size, -1)).transpose(0, 1)  # (pairs, rank, width)
        return tuple(part.flatten(1) for part in torch.split(slices, widths, 2))
    else:
        came = came.index_select(0, torch.cat(coming).argsort().to(device))
    return torch.split(came, widths, 1)


def _shared(pairs: Tensor, others: Tensor) -> Tensor:
    """Return the places, among some pairs, of those that are also among others."""
    return torch.isin(pairs, others, assume_unique=True).nonzero().flatten()
