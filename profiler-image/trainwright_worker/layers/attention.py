"""Attention kernels of torch by device, and causal attention whose query heads share keys and values.

`scaled_dot_product_attention` takes the first kernel that suits (torch's `sdp_utils`): FlashAttention or cuDNN's, which
store no scores and take no bias that requires a gradient; then the memory-efficient one, which takes both, but of each
query head its own keys and values; then products of matrices, which store all scores.

T5's and Swin's biases therefore get the memory-efficient kernel on GPUs, if their keys are adjacent in memory: torch
leaves it out for a bias whose last stride is not 1. It stores the biases once per micro-batch, (heads, positions,
positions), padded to strides of 8; all rows share them. But it computes their gradient for every row, (rows, heads,
positions, positions), while a block's backward runs.

`scaled_dot_product_attention` has no windows but as a mask. FlashAttention has them, and skips what they hide, in torch's operator
that `scaled_dot_product_attention` itself calls. The other kernels get a mask, (positions, positions) in the format of the
queries, which exists once per process and window, and compute all scores.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class AttentionKernel(StrEnum):
    """Kernel of attention: the first two store no scores."""

    FLASH = "flash"
    MEMORY_EFFICIENT = "memory-efficient"
    MATH = "math"


_HALF = frozenset({torch.float16, torch.bfloat16})
_LARGEST_FLASH_HEAD = 256
_AMPERE = (8, 0)
_FLASH_ALIGNMENT = 8
"""Multiple to which `scaled_dot_product_attention` pads heads for FlashAttention."""
_MASK_ALIGNMENT = 16
"""Multiple of a mask's stride that the memory-efficient kernel takes in every format."""


def attention_kernel(
    device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_size: int, *, is_biased: bool = False
) -> AttentionKernel:
    """Return the kernel that training gets from torch 2.8 to 2.13.

    Args:
        device_type: of the tensors; other devices than GPUs are taken to compute as CPUs do.
        capability: compute capability of a GPU; unused for other devices.
        dtype: of queries, keys and values.
        head_size: width of a head.
        is_biased: whether the scores have a bias that requires a gradient.
    """
    if device_type != "cuda":
        return AttentionKernel.MATH if is_biased else AttentionKernel.FLASH
    if not is_biased and _has_flash(capability, dtype, head_size):
        return AttentionKernel.FLASH
    alignment = 8 if dtype in _HALF else 4 if capability >= _AMPERE else 1
    if head_size % alignment or (dtype is torch.bfloat16 and capability < _AMPERE):
        return AttentionKernel.MATH
    return AttentionKernel.MEMORY_EFFICIENT


def _has_flash(capability: tuple[int, int], dtype: torch.dtype, head_size: int) -> bool:
    if capability < _AMPERE or dtype not in _HALF or head_size > _LARGEST_FLASH_HEAD:
        return False
    # The backward of consumer GPUs and L4 or L40 lacks shared memory for these heads.
    return not ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)) or not 192 < head_size <= 224


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Return causal attention; each head of keys and values serves as many consecutive query heads.

    Args:
        query: (rows, heads, positions, size).
        key: (rows, groups, positions, size).
        value: likewise.
        window: positions that a query attends to, its own included; None: all before.
        scale: of the scores; None: 1 / √size.
    """
    is_grouped = key.shape[1] != query.shape[1]
    if window is None and not is_grouped:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (0, 0)
    kernel = attention_kernel(query.device.type, capability, query.dtype, query.shape[-1])
    if window is not None and query.is_cuda and kernel is AttentionKernel.FLASH:
        return windowed_flash_attention(query, key, value, window, scale)
    mask = None if window is None else window_mask(query.shape[2], window, query.dtype, query.device)
    if is_grouped and kernel is AttentionKernel.MEMORY_EFFICIENT:
        return _ExpandedAttention.apply(query, key, value, mask, scale)  # type: ignore[no-any-return, no-untyped-call]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )


def windowed_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None = None
) -> Tensor:
    """Return causal attention within a window by FlashAttention; arguments as of `causal_attention`."""
    positions, size = query.shape[2], query.shape[-1]
    padding = -size % _FLASH_ALIGNMENT
    by_position = (functional.pad(part, (0, padding)).transpose(1, 2) for part in (query, key, value))
    mixed: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 (there is no public name)
        *by_position,
        None,
        None,
        positions,
        positions,
        0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=size**-0.5 if scale is None else scale,
        window_size_left=window - 1,
        window_size_right=0,
    )[0]
    return mixed[..., :size].transpose(1, 2)


@lru_cache(maxsize=8)
def window_mask(positions: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what is added to scores, (positions, positions): 0 within the window, −∞ elsewhere; rows are padded as kernels need."""
    padded = torch.full((positions, positions + -positions % _MASK_ALIGNMENT), -inf, dtype=dtype, device=device)
    mask = padded[:, :positions]
    shown = torch.ones(positions, positions, dtype=torch.bool, device=device).tril().triu(1 - window)
    return mask.masked_fill_(shown, 0.0)


class _ExpandedAttention(torch.autograd.Function):
    """Memory-efficient causal attention, within a window if its mask is given, which `enable_gqa` excludes.

    Keys and values are expanded for the kernel alone and again in the backward, so that as much is stored as
    FlashAttention stores, and the planner counts.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 (autograd takes no keywords)
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        copies = query.shape[1] // key.shape[1]
        mixed: Tensor
        mixed, *statistics = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 (not public)
            query,
            _expand(key, copies),
            _expand(value, copies),
            _by_head(mask, query),
            compute_log_sumexp=True,
            is_causal=mask is None,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, mixed, *statistics)
        ctx.mask, ctx.scale = mask, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, mixed, *statistics = ctx.saved_tensors
        copies = query.shape[1] // key.shape[1]
        of_query, of_keys, of_values, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(  # noqa: SLF001
            gradient,
            query,
            _expand(key, copies),
            _expand(value, copies),
            _by_head(ctx.mask, query),
            mixed,
            *statistics,
            0.0,
            [True, True, True, False],
            is_causal=ctx.mask is None,
            scale=ctx.scale,
        )
        return of_query, _sum_copies(of_keys, copies), _sum_copies(of_values, copies), None, None


def _by_head(mask: Tensor | None, query: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:2], *mask.shape)


def _expand(shared: Tensor, copies: int) -> Tensor:
    return shared.repeat_interleave(copies, 1)


def _sum_copies(gradients: Tensor, copies: int) -> Tensor:
    return torch.unflatten(gradients, 1, (-1, copies)).sum(2)
