"""Tensor and sequence parallelism: Megatron-LM's f (copy) and g (reduce) and their collectives.

Sequence parallelism follows Korthikanti et al. 2022, §4.2.2. Outside of f and g a tensor-parallel layer computes the
same on every rank of its group; under sequence parallelism each rank computes it for its own part of the sequence
(dimension 1). f becomes an all-gather (backward: reduce-scatter), g a reduce-scatter (backward: all-gather). Between f
and g nothing changes: a matrix product after f stores the full sequence for its backward, which the paper gathers again
instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trainwright_worker.initial_weights import part_start


class Collectives(Protocol):
    """Collectives of a tensor group, on one of its ranks. All ranks call them in the same order.

    Attributes:
        index: this rank's tensor index, and its index among stacked parts.
        size: number of ranks.
    """

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""

    def all_gather(self, part: Tensor) -> Tensor:
        """Gather every rank's values (count,), stacked as (size, count)."""

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Sum (size, count) over the ranks and return this rank's row, (count,)."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send row i of (size, count) to rank i; return what each rank sent to this one, (size, count)."""

    def exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the next `sent[i]` of values (count,) to rank i; return the `received[i]` values of every rank i, joined."""


SEQUENCE_DIMENSION = 1
"""Dimension of (rows, sequence, …) that is scattered."""


def scatter_sequence(group: Collectives, whole: Tensor) -> Tensor:
    """Return this rank's part of (rows, sequence, …), in its own storage, so that the full tensor can be freed."""
    part = whole.chunk(group.size, SEQUENCE_DIMENSION)[group.index]
    return part.clone(memory_format=torch.contiguous_format)


def gather_sequence(group: Collectives, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return full tensors from every rank's parts, with one all-gather; all have the same dtype."""
    stacked = group.all_gather(_concatenate([part.flatten() for part in parts]))
    pieces = torch.split(stacked, [part.numel() for part in parts], 1)
    return tuple(
        piece.view(group.size, *part.shape)
        .transpose(0, SEQUENCE_DIMENSION)
        .flatten(SEQUENCE_DIMENSION, SEQUENCE_DIMENSION + 1)
        for piece, part in zip(pieces, parts, strict=True)
    )


def reduce_scatter_sequence(group: Collectives, wholes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return this rank's parts of the tensors' sums over the ranks, with one reduce-scatter."""
    stacked_shards = [
        torch.unflatten(whole, SEQUENCE_DIMENSION, (group.size, -1)).transpose(0, SEQUENCE_DIMENSION)
        for whole in wholes
    ]
    shards = group.reduce_scatter(_concatenate([parts.flatten(1) for parts in stacked_shards]))
    pieces = torch.split(shards, [parts[0].numel() for parts in stacked_shards])
    return tuple(piece.view(parts.shape[1:]) for piece, parts in zip(pieces, stacked_shards, strict=True))


def _concatenate(flat: list[Tensor]) -> Tensor:
    """Join tensors into one message."""
    return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def enter_sequence_parallel(group: Collectives, *parts: Tensor) -> tuple[Tensor, ...]:
    """Apply f: all-gather the ranks' parts; the backward reduce-scatters the gradients."""
    return _EnterSequenceParallel.apply(group, *parts)  # type: ignore[no-any-return, no-untyped-call]


def leave_sequence_parallel(group: Collectives, partial: Tensor) -> Tensor:
    """Apply g: reduce-scatter the partial results; the backward all-gathers the gradient."""
    return _LeaveSequenceParallel.apply(group, partial)  # type: ignore[no-any-return, no-untyped-call]


class _EnterSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return gather_sequence(group, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *reduce_scatter_sequence(ctx.group, gradients)


class _LeaveSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, partial: Tensor) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(group, (partial,))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gather_sequence(ctx.group, (gradient,))[0]


BLOCK_SPLIT: Mapping[str, int] = {
    "qkv_weight": 1,
    "qkv_bias": 1,
    "attention_weight": 1,
    "expand_weight": 0,
    "expand_bias": 0,
    "contract_weight": 1,
}
"""Dimension that Megatron-LM splits, by weight of attention and GELU feed-forward."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Part of tensor-parallel layers on this rank: the `index`-th of `degree` parts, equal but for a vocabulary's.

    Attributes:
        collectives: the tensor group; None if a part is computed without its group (profiling).
        sequence_parallel: whether, outside of f and g, a rank has only its part of the sequence.
    """

    index: int = 0
    degree: int = 1
    collectives: Collectives | None = None
    sequence_parallel: bool = False

    def interval(self, size: int) -> tuple[int, int]:
        """Return where this rank's part of a dimension starts and stops; parts differ by one entry if they are not equal."""
        return part_start(size, self.index, self.degree), part_start(size, self.index + 1, self.degree)

    def slice_weight(self, whole: Tensor, dimension: int) -> Tensor:
        """Return this rank's part of a full weight."""
        start, stop = self.interval(whole.shape[dimension])
        return whole.narrow(dimension, start, stop - start).clone()

    def own_positions(self, whole: Tensor, dimension: int) -> Tensor:
        """Return this rank's part of a dimension that runs along the sequence; all of it without sequence parallelism."""
        if not self.sequence_parallel or self.collectives is None:
            return whole
        return whole.chunk(self.collectives.size, dimension)[self.collectives.index]

    def copy_to_tensor_group(self, activation: Tensor) -> Tensor:
        """Apply f: return the same activation on every rank; the backward sums the ranks' gradients."""
        if self.degree == 1 or self.collectives is None:
            return activation
        if self.sequence_parallel:
            return enter_sequence_parallel(self.collectives, activation)[0]
        return _copy(activation, self.collectives)

    def reduce_from_tensor_group(self, partial: Tensor) -> Tensor:
        """Apply g: sum the ranks' partial results; the backward passes the gradient unchanged."""
        if self.degree == 1 or self.collectives is None:
            return partial
        if self.sequence_parallel:
            return leave_sequence_parallel(self.collectives, partial)
        return _reduce(partial, self.collectives)

    def project_from_tensor_group(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by a weight that is split by input, apply g, and add the bias: in one operation if nothing is split."""
        if self.degree == 1:
            return functional.linear(values, weight, bias)
        reduced = self.reduce_from_tensor_group(functional.linear(values, weight))
        return reduced if bias is None else reduced + bias


class _CopyToTensorGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        ctx.group.all_reduce(gradient)
        return gradient, None


class _ReduceFromTensorGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Collectives) -> Tensor:
        group.all_reduce(partial)
        ctx.mark_dirty(partial)  # safe in place: a matrix product does not save its result for the backward
        return partial

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _copy(activation: Tensor, group: Collectives) -> Tensor:
    return _CopyToTensorGroup.apply(activation, group)  # type: ignore[no-any-return, no-untyped-call]


def _reduce(partial: Tensor, group: Collectives) -> Tensor:
    return _ReduceFromTensorGroup.apply(partial, group)  # type: ignore[no-any-return, no-untyped-call]


def copy_jointly_to_tensor_group(shard: TensorShard, *activations: Tensor) -> tuple[Tensor, ...]:
    """Apply f to several activations of one dtype; the backward sums their gradients in one all-reduce."""
    if shard.degree == 1 or shard.collectives is None:
        return activations
    if shard.sequence_parallel:
        return enter_sequence_parallel(shard.collectives, *activations)
    return _copy_jointly(shard.collectives, activations)


class _CopyJointly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, *activations: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(activation.view_as(activation) for activation in activations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        joint = torch.cat([gradient.flatten() for gradient in gradients])
        ctx.group.all_reduce(joint)
        parts = torch.split(joint, [gradient.numel() for gradient in gradients])
        return None, *(part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))


def _copy_jointly(group: Collectives, activations: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return _CopyJointly.apply(group, *activations)  # type: ignore[no-any-return, no-untyped-call]
