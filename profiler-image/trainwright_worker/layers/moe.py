"""Layers of a mixture of experts (Mixtral, Switch): Llama's attention, and a router before several feed-forwards."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Moe
from trainwright.families.moe import BALANCE_LOSS_WEIGHT
from trainwright_worker.initial_weights import InitialWeights, WeightSource, normal
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.llama import Block
from trainwright_worker.layers.tensor_parallel import Collectives, TensorShard, copy_jointly_to_tensor_group
from trainwright_worker.layers.token_models import RotaryLayers
from trainwright_worker.layers.transformer_parts import (
    Product,
    RotaryAttentionLayer,
    relu_feed_forward,
    rms_norm,
    swiglu,
)

GROUPED_PRODUCTS: Final = getattr(functional, "grouped_mm", None)
"""Product of consecutive groups of rows with a matrix each; torch has it from 2.10 on."""

_MAX_GROUPS = 1023


def has_grouped_products(tokens: Tensor) -> bool:
    """Return whether the device multiplies groups of rows, whose sizes only it knows, in one kernel.

    That is so for bfloat16 on Hopper and data-centre Blackwell. Elsewhere torch reads the sizes and multiplies group by group,
    in each product and again in its backward; then it is better to read them once, as `group_sizes` does.
    """
    if GROUPED_PRODUCTS is None or not tokens.is_cuda or tokens.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(tokens.device)[0] in {9, 10}


def is_groupable(weight: Tensor) -> bool:
    """Return whether grouped products take a bfloat16 weight (groups, …, inner): rows must begin at multiples of 16 bytes."""
    return len(weight) <= _MAX_GROUPS and all(
        offset % 8 == 0 for offset in (weight.storage_offset(), *weight.stride()[:-1])
    )


def grouped_linear(values: Tensor, weight: Tensor, *, ends: Tensor) -> Tensor:
    """Multiply each group of rows with its own weight.

    Args:
        values: (rows, inner).
        weight: (groups, outer, inner).
        ends: row where each group ends, (groups,), int32.
    """
    if GROUPED_PRODUCTS is None:
        raise RuntimeError("this torch has no grouped products; it needs 2.10")
    product: Tensor = GROUPED_PRODUCTS(values, weight.transpose(1, 2), offs=ends)
    return product


def group_sizes(ends: Tensor) -> list[int]:
    """Return the number of rows of each group. The host waits here until the GPU has chosen the experts.

    No form without waiting computes the same: shapes that hold for all choices give every expert room for all tokens (experts
    / k times the products), and dropping what exceeds a fixed room would train another model.
    """
    return [stop - start for start, stop in pairwise((0, *ends.tolist()))]


class RectifiedBlock(RotaryAttentionLayer):
    """Rotary attention and one plain feed-forward with a ReLU."""

    split_dimensions: ClassVar = {
        **RotaryAttentionLayer.split_dimensions,
        "expand_weight": 0,
        "contract_weight": 1,
    }

    feed_forward_norm_weight: nn.Parameter
    expand_weight: nn.Parameter
    contract_weight: nn.Parameter

    def __init__(self, moe: Moe, seed: int, layer: int, shard: TensorShard) -> None:
        source = WeightSource(seed, f"layer {layer}")
        super().__init__(moe, source, shard, layer)
        hidden, inner = moe.hidden_size, moe.feed_forward_size
        whole: InitialWeights = {
            "feed_forward_norm_weight": torch.ones(hidden),
            "expand_weight": normal(source, inner, hidden),
            "contract_weight": normal(source, hidden, inner),
        }
        self.register_shards(whole)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attend(boundary[0])
        normed = self.shard.copy_to_tensor_group(rms_norm(hidden, self.feed_forward_norm_weight, self.epsilon))
        return Output(
            (
                hidden
                + self.shard.reduce_from_tensor_group(
                    relu_feed_forward(normed, self.expand_weight, self.contract_weight)
                ),
            )
        )


class ExpertBlock(RotaryAttentionLayer):
    """Rotary attention and a mixture of experts: every token uses its top k experts; none is dropped.

    The tensor degree splits every expert's inner width, so each rank computes a part of every expert. The router is
    replicated, so all ranks of a tensor group choose the same experts. A token's experts are weighted by the router's
    probabilities, normalised to sum 1 (Mixtral); for k = 1 by the probability itself (Switch), since a constant weight of 1
    would not train the router.
    """

    split_dimensions: ClassVar = {
        **RotaryAttentionLayer.split_dimensions,
        "expand_weight": 2,
        "contract_weight": 2,
    }
    supports_sequence_parallel = False  # the loss needs all of a row's choices

    feed_forward_norm_weight: nn.Parameter
    router_weight: nn.Parameter
    expand_weight: nn.Parameter
    contract_weight: nn.Parameter

    def __init__(self, moe: Moe, seed: int, layer: int, shard: TensorShard) -> None:
        source = WeightSource(seed, f"layer {layer}")
        super().__init__(moe, source, shard, layer)
        hidden, inner = moe.hidden_size, moe.feed_forward_size
        products = 2 if moe.gated else 1
        whole: InitialWeights = {
            "feed_forward_norm_weight": torch.ones(hidden),
            "router_weight": normal(source, moe.experts, hidden),
            "expand_weight": normal(source, moe.experts, products, inner, hidden),
            "contract_weight": normal(source, moe.experts, hidden, inner),
        }
        self.register_shards(whole)
        self.experts, self.experts_per_token = moe.experts, moe.experts_per_token
        self.is_gated = moe.gated
        weight = moe.balance_loss_weight
        self.balance_loss_weight = BALANCE_LOSS_WEIGHT if weight is None else weight

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attend(boundary[0])
        normed = rms_norm(hidden, self.feed_forward_norm_weight, self.epsilon)
        # In float32: half-precision probabilities often tie, and ties are broken arbitrarily.
        probabilities = functional.softmax(functional.linear(normed, self.router_weight), -1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.experts_per_token, -1)
        mixture = self.shard.reduce_from_tensor_group(self._mixture(normed, weights, experts))
        return Output(
            (hidden + mixture.view_as(hidden),), self.balance_loss_weight * balance_loss(probabilities, experts)
        )

    def _mixture(self, normed: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return this rank's part of every token's weighted sum, (rows × sequence, hidden).

        Args:
            normed: (rows, sequence, hidden).
            weights: probabilities of each token's choices, (rows, sequence, k).
            experts: the choices, (rows, sequence, k).
        """
        if self.experts_per_token > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        normed, weights = copy_jointly_to_tensor_group(self.shard, normed, weights.to(normed.dtype))
        by_expert, order = experts.flatten().sort(stable=True)  # (token, choice) pairs
        ends = torch.searchsorted(
            by_expert, torch.arange(self.experts, device=experts.device), right=True, out_int32=True
        )
        dispatched = normed.flatten(0, 1).index_select(0, order // self.experts_per_token)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        by_token = self._experts(dispatched, ends).index_select(0, places)
        by_choice = by_token.view(-1, self.experts_per_token, normed.shape[-1])
        return (by_choice * weights.flatten(0, 1).unsqueeze(-1)).sum(1)

    def _experts(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Return each token's output of its expert, (pairs, hidden).

        Args:
            tokens: (pairs, hidden), ordered by expert.
            ends: where each expert's tokens end, (experts,).
        """
        if has_grouped_products(tokens) and is_groupable(self.expand_weight) and is_groupable(self.contract_weight):
            return self._expert(tokens, self.expand_weight, self.contract_weight, partial(grouped_linear, ends=ends))
        parts = torch.split(tokens, group_sizes(ends))
        weights = zip(parts, self.expand_weight, self.contract_weight, strict=True)
        return torch.cat([self._expert(part, expand, contract) for part, expand, contract in weights])

    def _expert(self, tokens: Tensor, expand: Tensor, contract: Tensor, product: Product = functional.linear) -> Tensor:
        if self.is_gated:
            return swiglu(tokens, expand, contract, product)
        return relu_feed_forward(tokens, expand.flatten(-3, -2), contract, product)


def balance_loss(probabilities: Tensor, experts: Tensor, group: Collectives | None = None) -> Tensor:
    """Return experts × Σ_e (share of a row's choices for e) × (mean probability of e in the row), summed over rows.

    Switch Transformers' loss takes both means over the batch: a product of sums over rows, which would depend on how a plan
    groups rows into micro-batches and replicas. Per row, it is a plain sum. It is one over positions, too, given the shares of
    all of them, which have no gradient.

    Args:
        probabilities: (rows, sequence, experts).
        experts: (rows, sequence, k).
        group: ranks that have equally many other positions of the rows; the sum of what they return is the loss.
    """
    choices, parts = experts.flatten(1), 1
    counts = torch.zeros_like(probabilities[:, 0]).scatter_add(
        1, choices, torch.ones_like(choices, dtype=probabilities.dtype)
    )
    if group is not None:
        group.all_reduce(counts)
        parts = group.size
    share = counts / (choices.shape[1] * parts)
    return probabilities.shape[-1] * (share * probabilities.mean(1)).sum() / parts


class MoeLayers(RotaryLayers):
    """Layers of a mixture of experts."""

    def __init__(self, moe: Moe) -> None:
        super().__init__(moe)
        self.moe = moe

    def block(self, layer: int, seed: int, shard: TensorShard) -> Layer:
        if layer % self.moe.expert_every == 0:
            return ExpertBlock(self.moe, seed, layer, shard)
        return (Block if self.moe.gated else RectifiedBlock)(self.moe, seed, layer, shard)
