"""Layers of a mixture of experts (Mixtral, Switch): Llama's attention, and a router before several feed-forwards."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Moe
from trainwright.families.moe import EXPERT_BLOCK
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, normal
from trainwright_worker.layers.llama import Block
from trainwright_worker.layers.tensor_parallel import TensorShard, copy_jointly_to_tensor_group
from trainwright_worker.layers.token_models import RotaryLayers
from trainwright_worker.layers.transformer_parts import RotaryAttentionLayer, relu_feed_forward, rms_norm, swiglu
from trainwright_worker.synthetic_data import weight_generator

BALANCE_LOSS_WEIGHT = 0.01
"""Weight of the balance loss (Switch Transformers' α)."""


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
        generator = weight_generator(seed, f"layer {layer}")
        super().__init__(moe, generator, shard)
        hidden, inner = moe.hidden_size, moe.feed_forward_size
        whole = {
            "feed_forward_norm_weight": torch.ones(hidden),
            "expand_weight": normal(generator, inner, hidden),
            "contract_weight": normal(generator, hidden, inner),
        }
        shard.register_shards(self, whole)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attend(boundary[0])
        normed = self.shard.copy_to_tensor_group(rms_norm(hidden, self.feed_forward_norm_weight))
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
        generator = weight_generator(seed, f"layer {layer}")
        super().__init__(moe, generator, shard)
        hidden, inner = moe.hidden_size, moe.feed_forward_size
        products = 2 if moe.gated else 1
        whole = {
            "feed_forward_norm_weight": torch.ones(hidden),
            "router_weight": normal(generator, moe.experts, hidden),
            "expand_weight": normal(generator, moe.experts, products, inner, hidden),
            "contract_weight": normal(generator, moe.experts, hidden, inner),
        }
        shard.register_shards(self, whole)
        self.experts, self.experts_per_token = moe.experts, moe.experts_per_token
        self.is_gated = moe.gated

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attend(boundary[0])
        normed = rms_norm(hidden, self.feed_forward_norm_weight)
        # In float32: half-precision probabilities often tie, and ties are broken arbitrarily.
        probabilities = functional.softmax(functional.linear(normed, self.router_weight), -1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.experts_per_token, -1)
        mixture = self.shard.reduce_from_tensor_group(self._mixture(normed, weights, experts))
        return Output((hidden + mixture.view_as(hidden),), self._balance_loss(probabilities, experts))

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
        order = experts.flatten().argsort(stable=True)  # order of (token, choice) pairs, by expert
        counts = experts.flatten().bincount(minlength=self.experts).tolist()
        dispatched = normed.flatten(0, 1).index_select(0, order // self.experts_per_token)
        expert_outputs = torch.cat(
            [self._expert(number, part) for number, part in enumerate(torch.split(dispatched, counts))]
        )
        by_token = expert_outputs.index_select(0, order.argsort()).view(-1, self.experts_per_token, normed.shape[-1])
        return (by_token * weights.flatten(0, 1).unsqueeze(-1)).sum(1)

    def _expert(self, number: int, tokens: Tensor) -> Tensor:
        expand, contract = self.expand_weight[number], self.contract_weight[number]
        return swiglu(tokens, expand, contract) if self.is_gated else relu_feed_forward(tokens, expand[0], contract)

    def _balance_loss(self, probabilities: Tensor, experts: Tensor) -> Tensor:
        """Return experts × Σ_e (share of a row's choices for e) × (mean probability of e in the row), summed over rows.

        Switch Transformers' loss takes both means over the batch: a product of sums over rows, which would depend on how a plan
        groups rows into micro-batches and replicas. Per row, it is a plain sum.

        Args:
            probabilities: (rows, sequence, experts).
            experts: (rows, sequence, k).
        """
        choices = experts.flatten(1)
        share = torch.zeros_like(probabilities[:, 0]).scatter_add(
            1, choices, torch.ones_like(choices, dtype=probabilities.dtype)
        )
        share = share / choices.shape[1]
        return BALANCE_LOSS_WEIGHT * self.experts * (share * probabilities.mean(1)).sum()


class MoeLayers(RotaryLayers):
    """Layers of a mixture of experts."""

    def __init__(self, moe: Moe) -> None:
        super().__init__(moe)
        self.moe = moe

    def block(self, kind: str, layer: int, seed: int, shard: TensorShard) -> Layer:
        if kind == EXPERT_BLOCK:
            return ExpertBlock(self.moe, seed, layer, shard)
        return (Block if self.moe.gated else RectifiedBlock)(self.moe, seed, layer, shard)
