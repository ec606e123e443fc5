"""A mixture of experts (Mixtral, Switch): Llama's attention, and a router before several feed-forwards."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Moe
from trainwright.families.moe import EXPERT_BLOCK
from trainwright_worker.batches import weight_generator
from trainwright_worker.layers.feed_forward import gated, rectified
from trainwright_worker.layers.joint_entry import enter_together
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.llama import Block
from trainwright_worker.layers.norms import rms_norm
from trainwright_worker.layers.rotary_attention import RotaryAttentionLayer
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_ends import RotaryLayers
from trainwright_worker.layers.weights import normal

BALANCE = 0.01
"""Share of the balance loss in the loss (Switch Transformers' α)."""


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
        shard.register(self, whole)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attended(boundary[0])
        normed = self.shard.enter(rms_norm(hidden, self.feed_forward_norm_weight))
        return Output((hidden + self.shard.leave(rectified(normed, self.expand_weight, self.contract_weight)),))


class ExpertBlock(RotaryAttentionLayer):
    """Rotary attention and a mixture of experts, in which every token meets its best k; none is dropped.

    A tensor degree divides every expert's width, so each rank computes a part of every expert. The router is whole on
    every rank, which makes all ranks of a tensor group choose the same experts. The sum of a token's experts is
    weighted by the router's probabilities, made to sum to one (Mixtral); where k is one, by the probability itself
    (Switch), for a weight that is always one would teach the router nothing.
    """

    split_dimensions: ClassVar = {
        **RotaryAttentionLayer.split_dimensions,
        "expand_weight": 2,
        "contract_weight": 2,
    }
    parts_sequence = False  # its loss needs all of a row's choices

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
        shard.register(self, whole)
        self.experts, self.chosen = moe.experts, moe.experts_per_token
        self.gated = moe.gated

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attended(boundary[0])
        normed = rms_norm(hidden, self.feed_forward_norm_weight)
        # In float32: among half-precision probabilities many are equal, and which of those is chosen is arbitrary.
        probabilities = functional.softmax(functional.linear(normed, self.router_weight), -1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.chosen, -1)
        mixture = self.shard.leave(self._mixture(normed, weights, experts))
        return Output((hidden + mixture.view_as(hidden),), self._balance_loss(probabilities, experts))

    def _mixture(self, normed: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """This rank's part of every token's weighted sum, (rows × sequence, hidden).

        Args:
            normed: (rows, sequence, hidden).
            weights: probabilities of each token's choices, (rows, sequence, k).
            experts: the choices, (rows, sequence, k).
        """
        if self.chosen > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        normed, weights = enter_together(self.shard, normed, weights.to(normed.dtype))
        order = experts.flatten().argsort(stable=True)  # of (token, choice) pairs, expert by expert
        counts = experts.flatten().bincount(minlength=self.experts).tolist()
        sent = normed.flatten(0, 1).index_select(0, order // self.chosen)
        made = torch.cat([self._expert(number, part) for number, part in enumerate(torch.split(sent, counts))])
        by_token = made.index_select(0, order.argsort()).view(-1, self.chosen, normed.shape[-1])
        return (by_token * weights.flatten(0, 1).unsqueeze(-1)).sum(1)

    def _expert(self, number: int, tokens: Tensor) -> Tensor:
        expand, contract = self.expand_weight[number], self.contract_weight[number]
        return gated(tokens, expand, contract) if self.gated else rectified(tokens, expand[0], contract)

    def _balance_loss(self, probabilities: Tensor, experts: Tensor) -> Tensor:
        """Experts × Σ_e (share of a row's choices that went to e) × (mean probability of e in the row), over the rows.

        Switch Transformers' loss takes both means over the batch. That is a product of sums over rows, whose value
        would depend on which rows a plan puts into one micro-batch or on one replica; by the row, it is a plain sum.

        Args:
            probabilities: (rows, sequence, experts).
            experts: (rows, sequence, k).
        """
        choices = experts.flatten(1)
        share = torch.zeros_like(probabilities[:, 0]).scatter_add(
            1, choices, torch.ones_like(choices, dtype=probabilities.dtype)
        )
        share = share / choices.shape[1]
        return BALANCE * self.experts * (share * probabilities.mean(1)).sum()


class MoeLayers(RotaryLayers):
    """A mixture of experts by its family's numbers."""

    def __init__(self, moe: Moe) -> None:
        super().__init__(moe)
        self.moe = moe

    def block(self, kind: str, layer: int, seed: int, shard: TensorShard) -> Layer:
        if kind == EXPERT_BLOCK:
            return ExpertBlock(self.moe, seed, layer, shard)
        return (Block if self.moe.gated else RectifiedBlock)(self.moe, seed, layer, shard)
