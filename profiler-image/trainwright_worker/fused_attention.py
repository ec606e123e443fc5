"""Attention as a GPU's fused kernel computes it, for counts on torch's meta device, which would store all scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ATTENTION: Final = functional.scaled_dot_product_attention


class FusedAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention on the meta device by its memory-efficient kernel, which stores no scores."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, attention by the fused kernel if that takes its arguments."""
        given = kwargs or {}
        if func is _ATTENTION and _is_fused(*args, **given):
            return _fused(*args, **given)
        if func is functional.multi_head_attention_forward:  # no mode sees the functions that it calls
            with patch.object(functional, "scaled_dot_product_attention", self._attention):
                return func(*args, **given)
        return func(*args, **given)

    def _attention(self, *args: Any, **given: Any) -> Any:
        return self.__torch_function__(_ATTENTION, (), args, given)


def _is_fused(query: Tensor, key: Tensor, *_others: Any, enable_gqa: bool = False, **_options: Any) -> bool:
    return query.device.type == "meta" and query.dim() == key.dim() == 4 and not enable_gqa


def _fused(  # noqa: PLR0913, PLR0917 (torch's own arguments)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_options: Any,
) -> Tensor:
    bias = attn_mask
    if bias is not None:
        added = bias if bias.is_floating_point() else bias.to(query.dtype)
        bias = added.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 (there is no public name)
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return output
