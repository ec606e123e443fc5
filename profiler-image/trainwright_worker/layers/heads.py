"""Between (rows, positions, width) and the heads of an attention, (rows, heads, positions, width of a head)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def by_head(values: Tensor, heads: int) -> Tensor:
    """(rows, positions, heads × size) to (rows, heads, positions, size)."""
    rows, positions, width = values.shape
    return values.view(rows, positions, heads, width // heads).transpose(1, 2)


def side_by_side(mixed: Tensor) -> Tensor:
    """(rows, heads, positions, size) to (rows, positions, heads × size)."""
    return mixed.transpose(1, 2).flatten(2)


def projected_by_head(values: Tensor, weight: Tensor, heads: int, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Several projections in one product, each (rows, heads, positions, size).

    Args:
        values: (rows, positions, width).
        weight: (projections, heads × size, width).
        heads: on this rank.
        bias: (projections, heads × size).
    """
    joint = functional.linear(values, weight.flatten(0, 1), None if bias is None else bias.flatten())
    rows, positions, _ = values.shape
    apart = joint.view(rows, positions, weight.shape[0], heads, weight.shape[1] // heads)
    return apart.permute(2, 0, 3, 1, 4).unbind()
