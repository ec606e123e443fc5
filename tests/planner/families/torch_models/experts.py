"""A block with experts: every token goes to its best k, and every expert gets equally many."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_models.parts import FeedForward, Gated, Reference, Residuals, RmsNorm, hidden, inputs, linear
from torch_models.sequences import llama_attention, llama_layer


class Experts(nn.Module):
    def __init__(self, moe) -> None:
        super().__init__()
        width, inner, self.experts, self.chosen = (
            moe.hidden_size,
            moe.feed_forward_size,
            moe.experts,
            moe.experts_per_token,
        )
        self.router, self.gated = linear(width, self.experts, bias=False), moe.gated

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(self.experts, *shape, device="meta"))

        self.expand, self.contract = weight(width, 2 * inner if self.gated else inner), weight(inner, width)

    def forward(self, values: Tensor) -> Tensor:
        tokens = values.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        source = order // self.chosen
        sent = tokens[source].unflatten(0, (self.experts, -1))
        expanded = torch.bmm(sent, self.expand)
        if self.gated:
            gate, up = expanded.chunk(2, -1)
            active = functional.silu(gate) * up
        else:
            active = functional.relu(expanded)
        made = torch.bmm(active, self.contract).flatten(0, 1) * weights.flatten()[order].unsqueeze(-1)
        # index_add would keep what it adds.
        return torch.zeros_like(tokens).index_put((source,), made, accumulate=True).view_as(values)


def moe_layer(moe, kind: str, stored: bool) -> Reference:
    width = moe.hidden_size
    if kind in {"embedding", "head"}:
        return llama_layer(moe, kind, stored)
    if kind == "expert_block":
        branch: nn.Module = Experts(moe)
    else:
        branch = (
            Gated(width, moe.feed_forward_size)
            if moe.gated
            else FeedForward(width, moe.feed_forward_size, bias=False, relu=True)
        )
    block = Residuals((RmsNorm(width), llama_attention(moe, stored)), (RmsNorm(width), branch))
    return Reference(block, inputs(hidden(moe.sequence_length, width)))
