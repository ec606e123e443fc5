"""Sequence parallelism beside tensor parallelism (Korthikanti et al. 2022, §4.2.2).

Outside of its two points f and g a tensor-parallel layer does the same on every rank of its group. Here each rank does
it for its own part of the sequence, dimension 1: f becomes an all-gather (backward a reduce-scatter), g a
reduce-scatter (backward an all-gather). What lies between f and g is as it was; so is what a matrix product behind f
keeps for its backward: the whole sequence, which the paper collects a second time instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright_worker.layers.collectives import Collectives

SEQUENCE = 1
"""The dimension of (rows, sequence, …) that is parted."""


def own_part(group: Collectives, whole: Tensor) -> Tensor:
    """This rank's part of (rows, sequence, …), in a storage of its own, so that the whole can be let go."""
    part = whole.chunk(group.size, SEQUENCE)[group.index]
    return part.clone(memory_format=torch.contiguous_format)


def collected(group: Collectives, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Whole tensors from every rank's parts of them, with one all-gather; they are of one number format."""
    stacked = group.all_gather(_beside([part.flatten() for part in parts]))
    pieces = torch.split(stacked, [part.numel() for part in parts], 1)
    return tuple(
        piece.view(group.size, *part.shape).transpose(0, SEQUENCE).flatten(SEQUENCE, SEQUENCE + 1)
        for piece, part in zip(pieces, parts, strict=True)
    )


def summed_parts(group: Collectives, wholes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """This rank's parts of the sums of whole tensors over the ranks, with one reduce-scatter."""
    apart = [torch.unflatten(whole, SEQUENCE, (group.size, -1)).transpose(0, SEQUENCE) for whole in wholes]
    found = group.reduce_scatter(_beside([parts.flatten(1) for parts in apart]))
    pieces = torch.split(found, [parts[0].numel() for parts in apart])
    return tuple(piece.view(parts.shape[1:]) for piece, parts in zip(pieces, apart, strict=True))


def _beside(flat: list[Tensor]) -> Tensor:
    """In one message."""
    return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def enter(group: Collectives, *parts: Tensor) -> tuple[Tensor, ...]:
    """f: whole activations for every rank from the ranks' parts; backward, the parts of the gradients' sums."""
    return _Enter.apply(group, *parts)  # type: ignore[no-any-return, no-untyped-call]


def leave(group: Collectives, partial: Tensor) -> Tensor:
    """g: this rank's part of the partial results' sum; backward, the whole gradient for every rank."""
    return _Leave.apply(group, partial)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return collected(group, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *summed_parts(ctx.group, gradients)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, partial: Tensor) -> Tensor:
        ctx.group = group
        return summed_parts(group, (partial,))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, collected(ctx.group, (gradient,))[0]
