"""Torch layers: they match the planner's counts and compute the right results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright_worker.layers.gpt import Block
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.live_bytes import AllocationTracker
from trainwright_worker.measure.layer_under_test import activation_bytes
from trainwright_worker.synthetic_data import token_rows

GPT = Gpt(layers=2, hidden_size=32, heads=4, sequence_length=16, vocabulary_size=64)
MODEL = Model.of(GPT)


def layer_of(model, kind: str, shard: TensorShard | None = None) -> nn.Module:
    number = model.layers.index(kind)
    return make_family_layers(model).make(number, seed=1, shard=shard or TensorShard(), shared={})


def out_of(block, hidden):
    return block((hidden,), {}).boundary[0]


@pytest.mark.parametrize("gpt", [GPT, Gpt(3, 48, 6, 20, 101), Gpt(1, 64, 8, 8, 50)])
@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
def test_parameters_are_as_many_as_the_planner_counts(gpt: Gpt, kind: str) -> None:
    model = Model.of(gpt)
    expected = next(k for k in model.kinds if k.name == kind)
    assert sum(p.numel() for p in layer_of(model, kind).parameters()) == expected.parameters


def test_the_block_computes_what_torchs_own_layer_computes() -> None:
    block = layer_of(MODEL, "block")
    theirs = nn.TransformerEncoderLayer(
        32, 4, dim_feedforward=128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        theirs.self_attn.in_proj_weight.copy_(block.qkv_weight.flatten(0, 1))
        theirs.self_attn.in_proj_bias.copy_(block.qkv_bias.flatten())
        theirs.self_attn.out_proj.weight.copy_(block.attention_weight)
        theirs.self_attn.out_proj.bias.copy_(block.attention_bias)
        theirs.linear1.weight.copy_(block.expand_weight)
        theirs.linear1.bias.copy_(block.expand_bias)
        theirs.linear2.weight.copy_(block.contract_weight)
        theirs.linear2.bias.copy_(block.contract_bias)
        theirs.norm1.weight.copy_(block.first_norm_weight)
        theirs.norm1.bias.copy_(block.first_norm_bias)
        theirs.norm2.weight.copy_(block.second_norm_weight)
        theirs.norm2.bias.copy_(block.second_norm_bias)
    hidden = torch.randn(2, 16, 32, generator=generator)
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    torch.testing.assert_close(
        out_of(block, hidden), theirs(hidden, src_mask=mask, is_causal=True), rtol=1e-4, atol=1e-5
    )


def test_joined_shards_equal_the_full_weights() -> None:
    whole = dict(layer_of(MODEL, "block").named_parameters())
    parts = [dict(layer_of(MODEL, "block", TensorShard(index, 4)).named_parameters()) for index in range(4)]
    for name, weight in whole.items():
        dimension = Block.split_dimensions.get(name)
        if dimension is None:
            assert all(torch.equal(part[name], weight) for part in parts)
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], dimension), weight)


def test_a_later_token_does_not_change_an_earlier_one() -> None:
    block = layer_of(MODEL, "block")
    hidden = torch.randn(1, 16, 32)
    changed = hidden.clone()
    changed[0, 10] += 1
    before, after = out_of(block, hidden), out_of(block, changed)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_rows_depend_on_seed_iteration_and_row_alone() -> None:
    tokens, targets = token_rows(16, 64, seed=1, iteration=2, first=0, count=6)
    part, _ = token_rows(16, 64, seed=1, iteration=2, first=4, count=2)
    assert torch.equal(tokens[4:], part)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    other, _ = token_rows(16, 64, seed=1, iteration=3, first=0, count=6)
    assert not torch.equal(tokens, other)
    follows = ((tokens + 7) % 32 == targets).float().mean().item()
    assert 0.75 < follows < 1


def test_live_bytes_follow_a_resized_storage() -> None:
    weights = torch.zeros(1000)
    with AllocationTracker([weights]) as live:
        weights.untyped_storage().resize_(0)
        assert live.live_bytes == 0
        weights.untyped_storage().resize_(4000)
        assert live.live_bytes == 4000
    assert live.peak_bytes == 4000


def test_live_bytes_follow_allocations_and_frees() -> None:
    existing = torch.zeros(1000)
    with AllocationTracker([existing]) as live:
        for _ in range(3):
            a = torch.ones(500)
            b = a + 1
            view = b[:10]
            del a, b, view
        assert live.live_bytes == 4000
    assert live.peak_bytes == 4000 + 2 * 2000


def test_activations_are_counted_once_and_without_weights() -> None:
    layer = nn.Linear(10, 20)
    hidden = torch.randn(3, 10, requires_grad=True)
    # Linear stores its input, tanh its output.
    assert activation_bytes(lambda: torch.tanh(layer(hidden)), layer.parameters(), [hidden]) == 4 * (3 * 10 + 3 * 20)
