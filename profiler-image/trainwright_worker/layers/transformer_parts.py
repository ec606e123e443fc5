"""Building blocks of transformers: rotary attention, norms, position biases and feed-forwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Llama, Moe
from trainwright.families.fields import NORM_EPSILON, ROTARY_BASE, RotaryScaling
from trainwright.families.llama import has_norm_after, has_norm_before, is_normalised_over_width, is_windowed, window_of
from trainwright_worker.initial_weights import InitialWeights, WeightSource, normal
from trainwright_worker.layers.attention import causal_attention
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.width_norms import rms_norms_over_group

Product = Callable[[Tensor, Tensor], Tensor]
"""Product of values (…, inner) with a weight (…, outer, inner)."""


def swiglu(values: Tensor, expand: Tensor, contract: Tensor, product: Product = functional.linear) -> Tensor:
    """Apply SwiGLU: contract(silu(gate) × up).

    Args:
        values: (…, width).
        expand: (…, 2, inner, width): gate and up projection, computed in one product.
        contract: (…, width, inner).
        product: how to multiply by either.
    """
    gate, up = product(values, expand.flatten(-3, -2)).chunk(2, -1)
    return product(functional.silu(gate) * up, contract)


def geglu(values: Tensor, expand: Tensor, contract: Tensor) -> Tensor:
    """Apply GEGLU of T5 1.1 and Gemma, whose GELU is the approximation by tanh; shapes as in `swiglu`."""
    gate, up = functional.linear(values, expand.flatten(-3, -2)).chunk(2, -1)
    return functional.linear(approximate_gelu(gate) * up, contract)


def approximate_gelu(values: Tensor) -> Tensor:
    return functional.gelu(values, approximate="tanh")


def relu_feed_forward(values: Tensor, expand: Tensor, contract: Tensor, product: Product = functional.linear) -> Tensor:
    """Apply a feed-forward with a ReLU: `expand` (…, inner, width), then `contract` (…, width, inner)."""
    return product(functional.relu(product(values, expand)), contract)


def by_head(values: Tensor, heads: int) -> Tensor:
    """Rearrange (rows, positions, heads × size) into (rows, heads, positions, size)."""
    rows, positions, width = values.shape
    return values.view(rows, positions, heads, width // heads).transpose(1, 2)


def join_heads(mixed: Tensor) -> Tensor:
    """Rearrange (rows, heads, positions, size) into (rows, positions, heads × size)."""
    return mixed.transpose(1, 2).flatten(2)


def project_by_head(values: Tensor, weight: Tensor, heads: int, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Compute several projections in one product, each (rows, heads, positions, size).

    Args:
        values: (rows, positions, width).
        weight: (projections, heads × size, width).
        heads: heads on this rank.
        bias: (projections, heads × size).
    """
    joint = functional.linear(values, weight.flatten(0, 1), None if bias is None else bias.flatten())
    rows, positions, _ = values.shape
    by_projection = joint.view(rows, positions, weight.shape[0], heads, weight.shape[1] // heads)
    return by_projection.permute(2, 0, 3, 1, 4).unbind()


def rms_norm(values: Tensor, weight: Tensor, epsilon: float = NORM_EPSILON) -> Tensor:
    """Divide each position of (…, width) by its root mean square, and multiply by a weight (width,)."""
    return functional.rms_norm(values, weight.shape, weight, epsilon)


def rms_norm_by_head(values: Tensor, weight: Tensor, epsilon: float = NORM_EPSILON) -> Tensor:
    """Normalise each head of (…, heads × size) alone, with one weight (size,) for all of them."""
    return rms_norm(torch.unflatten(values, -1, (-1, len(weight))), weight, epsilon).flatten(-2)


def block_norms(family: Llama | Moe, before: str, after: str) -> dict[str, Tensor]:
    """Return the weights of a branch's norms, by name."""
    names = (before,) * has_norm_before(family) + (after,) * has_norm_after(family)
    return {name: torch.ones(family.hidden_size) for name in names}


def norm_epsilon(family: Llama | Moe) -> float:
    return NORM_EPSILON if family.norm_epsilon is None else family.norm_epsilon


QUERY_NORM, KEY_NORM = HEAD_NORMS = "query_norm_weight", "key_norm_weight"
QUERY_WIDTH_NORM, KEY_WIDTH_NORM = "query_width_norm_weight", "key_width_norm_weight"
QUERY_BIAS, KEY_BIAS, VALUE_BIAS = "query_bias", "key_bias", "value_bias"
ATTENTION_NORM, ATTENTION_OUTPUT_NORM = "attention_norm_weight", "attention_output_norm_weight"


MAX_DISTANCE = 128
"""Distance from which on all distances share one bucket."""


def relative_position_buckets(queries: int, keys: int, buckets: int, *, bidirectional: bool) -> Tensor:
    """Return the bucket of every distance key − query from −(queries − 1) to keys − 1, (queries + keys − 1,).

    Half of the buckets are single distances, the others grow logarithmically. If `bidirectional`, half of all buckets are for
    keys after the query; otherwise such keys share bucket 0 with the query itself.
    """
    distance = torch.arange(-(queries - 1), keys)
    buckets_per_side = max(1, buckets // 2) if bidirectional else buckets
    offset = (distance > 0) * (buckets // 2 if bidirectional else 0)
    distance = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact_buckets = buckets_per_side // 2
    if exact_buckets == 0:
        return offset
    furthest = max(MAX_DISTANCE, 2 * exact_buckets)
    growth = (distance.clamp(min=1).float() / exact_buckets).log() / math.log(furthest / exact_buckets)
    log_bucket = exact_buckets + (growth * (buckets_per_side - exact_buckets)).long().clamp(
        max=buckets_per_side - exact_buckets - 1
    )
    return offset + torch.where(distance < exact_buckets, distance, log_bucket)


def gather_biases(
    table: Tensor, by_distance: Tensor, queries: int, *, is_causal: bool = False, first: int = 0
) -> Tensor:
    """Return the biases added to attention scores, (1, heads, queries, keys).

    Each distance is looked up once; query i uses the window of distances that starts at −first − i.

    Args:
        table: (buckets, heads).
        by_distance: result of `relative_position_buckets`, or its part for these queries, (queries + keys − 1,).
        queries: number of queries.
        is_causal: whether keys after their query get −∞.
        first: position of the first query.
    """
    keys = by_distance.numel() - queries + 1
    if is_causal:
        past_biases = functional.embedding(by_distance[: first + queries], table).T
        biases = functional.pad(past_biases, (0, keys - 1 - first), value=-math.inf)
    else:
        biases = functional.embedding(by_distance, table).T.contiguous()  # see attention.py: keys are adjacent
    return biases.unfold(-1, keys, 1).flip(-2).unsqueeze(0)


class RotaryAttentionLayer(Layer):
    """Attention half of a block: hidden states (rows, sequence, hidden) plus their rotary attention, within a window if there is one.

    The tensor degree splits heads: query, key and value by output, the output projection by input. The three are projected
    separately, so that queries and keys are freed once rotated.
    """

    split_dimensions: ClassVar = {
        **dict.fromkeys(("query_weight", "key_weight", "value_weight", QUERY_BIAS, KEY_BIAS, VALUE_BIAS), 0),
        **dict.fromkeys((QUERY_WIDTH_NORM, KEY_WIDTH_NORM), 0),
        "attention_weight": 1,
    }
    partial_gradients: ClassVar = frozenset(HEAD_NORMS)  # each rank normalises its own heads alone
    supports_sequence_parallel = True

    query_weight: nn.Parameter
    key_weight: nn.Parameter
    value_weight: nn.Parameter
    attention_weight: nn.Parameter
    cosines: Tensor
    sines: Tensor

    def __init__(self, family: Llama | Moe, source: WeightSource, shard: TensorShard, layer: int) -> None:
        super().__init__()
        hidden, groups = family.hidden_size, family.key_value_heads or family.heads
        size = family.head_size or hidden // family.heads
        if size % 2:
            raise ValueError(
                f"rotary positions turn pairs of values: {family.family}.head_size, or hidden_size {hidden} over heads "
                f"{family.heads}, must be even, got {size}"
            )
        whole: InitialWeights = {
            **block_norms(family, ATTENTION_NORM, ATTENTION_OUTPUT_NORM),
            "query_weight": normal(source, family.heads * size, hidden),
            "key_weight": normal(source, groups * size, hidden),
            "value_weight": normal(source, groups * size, hidden),
            "attention_weight": normal(source, hidden, family.heads * size),
        }
        self.has_width_norms = is_normalised_over_width(family)
        self.has_head_norms = family.query_key_norm and not self.has_width_norms
        if self.has_head_norms:
            whole = {**whole, **{name: torch.ones(size) for name in HEAD_NORMS}}  # each has values of its own
        if self.has_width_norms:
            queries, keys = torch.ones(family.heads * size), torch.ones(groups * size)
            whole = {**whole, QUERY_WIDTH_NORM: queries, KEY_WIDTH_NORM: keys}
        if family.query_key_value_bias:
            sizes = {QUERY_BIAS: family.heads, KEY_BIAS: groups, VALUE_BIAS: groups}
            whole = {**whole, **{name: torch.zeros(count * size) for name, count in sizes.items()}}
        self.shard, self.window, is_local = shard, window_of(family, layer), is_windowed(family, layer)
        self.register_shards(whole)
        self.heads, self.groups = family.heads // shard.degree, groups // shard.degree
        base, scaling = family.rotary_base or ROTARY_BASE, family.rotary_scaling
        if is_local and family.window_rotary_base is not None:
            base, scaling = family.window_rotary_base, None
        angles = rotary_angles(family.sequence_length, size, base, scaling)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        self.has_biases = family.query_key_value_bias
        self.epsilon, self.scale = norm_epsilon(family), family.attention_scale
        self.multiplier = family.residual_multiplier

    def attend(self, hidden: Tensor) -> Tensor:
        mixed = self.shard.reduce_from_tensor_group(self._attention(hidden))
        return self.add_branch(hidden, mixed, ATTENTION_OUTPUT_NORM)

    def add_branch(self, hidden: Tensor, branch: Tensor, norm: str) -> Tensor:
        """Return hidden states plus what a branch returned, with the norm of that name and the factor, if the block has them."""
        normed = self.normalise(branch, norm)
        return hidden + normed if self.multiplier is None else torch.add(hidden, normed, alpha=self.multiplier)

    def normalise(self, values: Tensor, norm: str) -> Tensor:
        """Return the values (…, hidden) normalised with a norm of the block; as they are if it has none of this name."""
        return rms_norm(values, self.get_parameter(norm), self.epsilon) if norm in self._parameters else values

    def _attention(self, hidden: Tensor) -> Tensor:
        normed = self.shard.copy_to_tensor_group(self.normalise(hidden, ATTENTION_NORM))
        angles = self.cosines.to(normed.dtype), self.sines.to(normed.dtype)
        query = functional.linear(normed, self.query_weight, self._bias(QUERY_BIAS))
        key = functional.linear(normed, self.key_weight, self._bias(KEY_BIAS))
        if self.has_head_norms:
            query = rms_norm_by_head(query, self.get_parameter(QUERY_NORM), self.epsilon)
            key = rms_norm_by_head(key, self.get_parameter(KEY_NORM), self.epsilon)
        if self.has_width_norms:
            query, key = self._normalise_widths(query, key)
        query = by_head(rotate(query, self.heads, *angles), self.heads)
        key = by_head(rotate(key, self.groups, *angles), self.groups)
        value = by_head(functional.linear(normed, self.value_weight, self._bias(VALUE_BIAS)), self.groups)
        mixed = causal_attention(query, key, value, self.window, self.scale)
        return functional.linear(join_heads(mixed), self.attention_weight)

    def _normalise_widths(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.get_parameter(QUERY_WIDTH_NORM), self.get_parameter(KEY_WIDTH_NORM)
        if self.shard.degree > 1:
            return rms_norms_over_group(self.shard, query, key, weights, self.epsilon)
        return rms_norm(query, weights[0], self.epsilon), rms_norm(key, weights[1], self.epsilon)

    def _bias(self, name: str) -> Tensor | None:
        return self.get_parameter(name) if self.has_biases else None


def rotate(values: Tensor, heads: int, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of a head's first values by their angles; shape (rows, sequence, heads × size).

    As many values are rotated as there are cosines and sines, the first half of them with the second; the others stay.
    This layout, rather than by head, is the one in which attention returns its result, so the following product need not copy
    and store the result.
    """
    rows, sequence, width = values.shape
    by_place, pairs = values.view(rows, sequence, heads, width // heads), cosines.shape[-1]
    first, second, *rest = (part for part in by_place.tensor_split((pairs, 2 * pairs), -1) if part.shape[-1])
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, *rest), -1).flatten(2)


def rotary_angles(sequence: int, size: int, base: float = ROTARY_BASE, scaling: RotaryScaling | None = None) -> Tensor:
    """Return the angle of every position and pair of values, (sequence, 1, size / 2)."""
    frequencies = base ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    return torch.outer(torch.arange(sequence, dtype=torch.float32), frequencies).unsqueeze(1)


def _scaled(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Return scaled frequencies (size / 2,): all divided by the factor, or in Llama 3 the low ones, blended up to the high ones."""
    divided = frequencies / scaling.factor
    if scaling.kind == "linear":
        return divided
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    kept = ((turns - scaling.low_frequency_factor) / span).clamp(0, 1)
    return kept * frequencies + (1 - kept) * divided
