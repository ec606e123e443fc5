"""Parts of the reference layers: normalisation, attention, feed-forward, residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Reference:
    """Torch layer and a function that makes its inputs: `inputs(rows, device, dtype)`."""

    module: nn.Module
    inputs: Callable[[int, str, torch.dtype], tuple[Tensor, ...]]


def hidden(*shape: int) -> Callable[[int, str, torch.dtype], Tensor]:
    """Return a function that makes activations that require gradients."""
    return lambda rows, device, dtype: torch.ones(rows, *shape, device=device, dtype=dtype, requires_grad=True)


def image(*shape: int) -> Callable[[int, str, torch.dtype], Tensor]:
    """Return a maker of data that requires no gradient."""
    return lambda rows, device, dtype: torch.ones(rows, *shape, device=device, dtype=dtype)


def indices(*shape: int) -> Callable[[int, str, torch.dtype], Tensor]:
    return lambda rows, device, dtype: torch.zeros(rows, *shape, device=device, dtype=torch.long)


def inputs(*makers: Callable[[int, str, torch.dtype], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda rows, device, dtype: tuple(maker(rows, device, dtype) for maker in makers)


class _KeepsOneStatistic(torch.autograd.Function):
    """RMSNorm as torch's fused CUDA kernel keeps it: its input and one float32 for each position.

    On other devices torch takes it apart into operators that keep a second copy. Only the forward is run here.
    """

    @staticmethod
    def forward(ctx, values: Tensor, weight: Tensor) -> Tensor:
        inverse = values.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(values, weight, inverse)
        return (values * inverse).to(values.dtype) * weight


class Dropout(nn.Module):
    """Dropout that saves a one-byte mask per element, as torch does on a GPU; on the CPU it would save floats."""

    def forward(self, values: Tensor) -> Tensor:
        return torch.native_dropout(values, 0.1, train=True)[0]


def maybe_dropout(drops: bool) -> nn.Module:
    return Dropout() if drops else nn.Identity()


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="meta"))

    def forward(self, values: Tensor) -> Tensor:
        return _KeepsOneStatistic.apply(values, self.weight)


def linear(inner: int, outer: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inner, outer, bias=bias, device="meta")


def layer_norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, device="meta")


def rotate(values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return values * cosines + torch.cat((-second, first), -1) * sines


class Attention(nn.Module):
    """Multi-head attention with separate or one joint projection.

    `bias_table`: entries of a table of biases for relative positions; `by_head`: its layout.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        stored: bool,
        bias: bool = True,
        groups: int | None = None,
        causal: bool = False,
        rotary: bool = False,
        table: int = 0,
        drops: bool = False,
        size: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.stored, self.causal, self.rotary = heads, groups or heads, stored, causal, rotary
        self.size = size or width // heads
        self.dropout, self.output_dropout = maybe_dropout(drops), maybe_dropout(drops)
        self.query = linear(width, heads * self.size, bias=bias)
        self.key = linear(width, self.groups * self.size, bias=bias)
        self.value = linear(width, self.groups * self.size, bias=bias)
        self.output = linear(heads * self.size, width, bias=bias)
        self.table = nn.Parameter(torch.zeros(table, heads, device="meta")) if table else None

    def forward(self, values: Tensor, source: Tensor | None = None) -> Tensor:
        source = values if source is None else source
        query = self.query(values).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        key = self.key(source).unflatten(-1, (self.groups, self.size)).transpose(1, 2)
        value = self.value(source).unflatten(-1, (self.groups, self.size)).transpose(1, 2)
        if self.rotary:
            angles = torch.ones(values.shape[1], self.size, device=values.device, dtype=values.dtype)
            query, key = rotate(query, angles, angles), rotate(key, angles, angles)
        mix = self._stored if self.stored else self._fused
        return self.output_dropout(self.output(mix(query, key, value).transpose(1, 2).flatten(2)))

    def _biases(self, queries: int, keys: int) -> Tensor | None:
        if self.table is None:
            return None
        places = torch.zeros(queries, keys, device=self.table.device, dtype=torch.long)
        return self.table[places].permute(2, 0, 1)[None]

    def _fused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention without mask gradient and dropout, which the CPU kernel lacks; GPU kernels save the same tensors."""
        biases = self._biases(query.shape[2], key.shape[2])
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if biases is None else biases.detach().contiguous(),
            is_causal=self.causal,
            enable_gqa=self.groups != self.heads,
        )

    def _stored(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shared = self.heads // self.groups
        if shared > 1:
            key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) * self.size**-0.5
        biases = self._biases(query.shape[2], key.shape[2])
        if biases is not None:
            scores = scores + biases
        if self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(mask, float("-inf"))
        return self.dropout(scores.softmax(-1)) @ value


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, *, bias: bool = True, relu: bool = False, drops: bool = False) -> None:
        super().__init__()
        self.expand, self.contract = linear(width, inner, bias=bias), linear(inner, width, bias=bias)
        self.activation = functional.relu if relu else functional.gelu
        self.inner_dropout, self.dropout = maybe_dropout(drops and relu), maybe_dropout(drops)

    def forward(self, values: Tensor) -> Tensor:
        return self.dropout(self.contract(self.inner_dropout(self.activation(self.expand(values)))))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int, *, gelu: bool = False, drops: bool = False) -> None:
        super().__init__()
        self.activation = functional.gelu if gelu else functional.silu
        self.inner_dropout, self.dropout = maybe_dropout(drops), maybe_dropout(drops)
        self.gate, self.up = linear(width, inner, bias=False), linear(width, inner, bias=False)
        self.down = linear(inner, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        gated = self.activation(self.gate(values)) * self.up(values)
        return self.dropout(self.down(self.inner_dropout(gated)))


class Residuals(nn.Module):
    """Branches one after another, each normalised first and added to what it read."""

    def __init__(self, *branches: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.ModuleList(branch) for branch in branches)

    def forward(self, values: Tensor) -> Tensor:
        for norm, branch in self.branches:
            values = values + branch(norm(values))
        return values


class TokenEmbedding(nn.Module):
    """Tokens, and learned positions where there are any."""

    def __init__(self, vocabulary: int, width: int, positions: int = 0, *, drops: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.ones(vocabulary, width, device="meta"))
        self.positions = nn.Parameter(torch.ones(positions, width, device="meta")) if positions else None
        self.dropout = maybe_dropout(drops)

    def forward(self, tokens: Tensor) -> Tensor:
        found = functional.embedding(tokens, self.tokens)
        return self.dropout(found if self.positions is None else found + self.positions)


class TokenHead(nn.Module):
    """Normalisation, projection, loss; `scale` as T5 does before a tied projection."""

    def __init__(
        self, norm: nn.Module, width: int, vocabulary: int, scale: float = 1.0, *, drops: bool = False
    ) -> None:
        super().__init__()
        self.norm, self.projection, self.scale = norm, linear(width, vocabulary, bias=False), scale
        self.dropout = maybe_dropout(drops)

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        normed = self.dropout(self.norm(values))
        logits = self.projection(normed if self.scale == 1 else normed * self.scale)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
