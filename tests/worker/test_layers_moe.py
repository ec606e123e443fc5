"""Mixtures of experts: they equal Hugging Face's Mixtral and Switch Transformers with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hugging_face import Same, WholeModel, assert_same_training
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig, MixtralForCausalLM, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersLayerFF

from trainwright.families import Moe
from trainwright_worker.layers import moe as moe_layers

ROWS = 3


def mixtral(moe: Moe) -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=moe.vocabulary_size,
            hidden_size=moe.hidden_size,
            intermediate_size=moe.feed_forward_size,
            num_hidden_layers=moe.layers,
            num_attention_heads=moe.heads,
            num_key_value_heads=moe.key_value_heads or moe.heads,
            num_local_experts=moe.experts,
            num_experts_per_tok=moe.experts_per_token,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=moe.tied_embeddings,
            attn_implementation="eager",
        )
    )


def pairs(ours: WholeModel, theirs: MixtralForCausalLM) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    yield Same(theirs.model.embed_tokens.weight, embedding.tokens)
    for block, layer in zip(blocks, theirs.model.layers, strict=True):
        yield Same(layer.input_layernorm.weight, block.attention_norm_weight)
        yield Same(layer.self_attn.q_proj.weight, block.query_weight)
        yield Same(layer.self_attn.k_proj.weight, block.key_weight)
        yield Same(layer.self_attn.v_proj.weight, block.value_weight)
        yield Same(layer.self_attn.o_proj.weight, block.attention_weight)
        yield Same(layer.post_attention_layernorm.weight, block.feed_forward_norm_weight)
        yield Same(layer.mlp.gate.weight, block.router_weight)
        yield Same(layer.mlp.experts.gate_up_proj, block.expand_weight)
        yield Same(layer.mlp.experts.down_proj, block.contract_weight)
    yield Same(theirs.model.norm.weight, head.norm_weight)
    yield Same(theirs.lm_head.weight, head.tokens)


@pytest.mark.parametrize(
    "moe",
    [
        Moe(2, 32, 4, 16, 64, experts=4, intermediate_size=24, key_value_heads=2),
        Moe(1, 32, 4, 16, 64, experts=6, experts_per_token=3, intermediate_size=24, tied_embeddings=True),
    ],
    ids=["two of four", "three of six"],
)
def test_loss_and_gradients_are_mixtrals(moe: Moe) -> None:
    ours, theirs = WholeModel(replace(moe, balance_loss_weight=0.0)), mixtral(moe)
    same = tuple(pairs(ours, theirs))
    for pair in same:
        pair.copy()
    rows = ours.rows(ROWS)
    loss = sum(ours.losses(rows))
    logits = theirs(input_ids=rows["tokens"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
    assert_same_training(loss / ROWS, expected, same)


def test_the_balance_loss_of_a_row_is_mixtrals_by_choice() -> None:
    """Mixtral counts each of a token's k choices as one, so its loss is k times as large."""
    moe = Moe(1, 32, 4, 16, 64, experts=4, intermediate_size=24)
    ours, theirs = WholeModel(moe), mixtral(moe)
    for pair in pairs(ours, theirs):
        pair.copy()
    total = 0
    for row in range(ROWS):
        rows = {field: values[row : row + 1] for field, values in ours.rows(ROWS).items()}
        balance, _ = ours.losses(rows)
        logits = theirs(input_ids=rows["tokens"], output_router_logits=True).router_logits
        expected = load_balancing_loss_func(logits, moe.experts, moe.experts_per_token)
        torch.testing.assert_close(balance, 0.01 * expected / moe.experts_per_token)
        total += balance
    together, _ = ours.losses(ours.rows(ROWS))
    torch.testing.assert_close(together, total)


def test_balance_loss_has_a_gradient_for_the_router() -> None:
    block = WholeModel(Moe(1, 32, 4, 16, 64, experts=4, intermediate_size=24)).layers[1]
    loss = block((torch.randn(ROWS, 16, 32),), {}).loss
    loss.backward()
    assert block.router_weight.grad.abs().sum() > 0
    assert block.expand_weight.grad is None


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    if moe_layers.GROUPED_PRODUCTS is None:
        pytest.skip("this torch has no grouped products")
    monkeypatch.setattr(moe_layers, "has_grouped_products", lambda _: True)
    monkeypatch.setattr(moe_layers, "group_sizes", lambda _: pytest.fail("waited for the GPU"))


def trained(block: torch.nn.Module, hidden: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Return a block's output and the gradients of its input and weights."""
    hidden = hidden.clone().requires_grad_()
    made = block((hidden,), {}).boundary[0]
    return [made, *torch.autograd.grad(made, [hidden, *block.parameters()], gradient)]


GROUPED = [
    Moe(1, 32, 4, 16, 64, experts=4, intermediate_size=24),
    Moe(1, 32, 4, 16, 64, experts=64, experts_per_token=1, intermediate_size=24, gated=False),
]


@pytest.mark.parametrize("moe", GROUPED, ids=["two of four", "some without tokens"])
def test_grouped_products_equal_the_experts_one_by_one(moe: Moe, request: pytest.FixtureRequest) -> None:
    block = WholeModel(moe).layers[1]
    hidden, gradient = torch.randn(ROWS, 16, 32), torch.randn(ROWS, 16, 32)
    expected = trained(block, hidden, gradient)
    request.getfixturevalue("grouped")
    for found, one in zip(trained(block, hidden, gradient), expected, strict=True):
        torch.testing.assert_close(found, one)


def test_grouped_products_need_no_values_on_the_host(grouped: None) -> None:
    block = WholeModel(GROUPED[0]).layers[1].bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(ROWS, 16, 32, dtype=torch.bfloat16)
        made, *gradients = trained(block, hidden, hidden)
    assert made.shape == hidden.shape
    assert [one.shape for one in gradients] == [hidden.shape, *(weight.shape for weight in block.parameters())]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (torch.empty(4, 24, 32), True),
        (torch.empty(4, 32, 20), False),
        (torch.empty(4 * 24 * 32 + 4)[4:].view(4, 24, 32), False),
        (torch.empty(1024, 8, 8), False),
    ],
    ids=["aligned", "odd rows", "odd start", "too many"],
)
def test_grouped_products_take_weights_whose_rows_are_aligned(weight: torch.Tensor, expected: bool) -> None:
    assert moe_layers.is_groupable(weight) is expected


def switch_feed_forward(moe: Moe, *, sparse: bool) -> SwitchTransformersLayerFF:
    return SwitchTransformersLayerFF(
        SwitchTransformersConfig(
            d_model=moe.hidden_size,
            d_ff=moe.feed_forward_size,
            num_experts=moe.experts,
            expert_capacity=1000,
            dropout_rate=0,
            router_jitter_noise=0,
        ),
        is_sparse=sparse,
    )


def test_one_expert_per_token_equals_switch_transformers() -> None:
    moe = Moe(2, 32, 4, 16, 64, experts=6, experts_per_token=1, expert_every=2, intermediate_size=24, gated=False)
    _, plain, block, _ = WholeModel(moe).layers
    theirs = switch_feed_forward(moe, sparse=True)
    same = [
        Same(theirs.layer_norm.weight, block.feed_forward_norm_weight),
        Same(theirs.mlp.router.classifier.weight, block.router_weight),
    ]
    for number, expert in enumerate(theirs.mlp.experts.values()):
        same.append(Same(expert.wi.weight, block.expand_weight, lambda w, number=number: w[number, 0]))
        same.append(Same(expert.wo.weight, block.contract_weight, lambda w, number=number: w[number]))
    dense = switch_feed_forward(moe, sparse=False)
    same_dense = [
        Same(dense.layer_norm.weight, plain.feed_forward_norm_weight),
        Same(dense.mlp.wi.weight, plain.expand_weight),
        Same(dense.mlp.wo.weight, plain.contract_weight),
    ]
    for layer, reference, matching in ((block, theirs, same), (plain, dense, same_dense)):
        for pair in matching:
            pair.copy()
        hidden, gradient = torch.randn(ROWS, 16, 32), torch.randn(ROWS, 16, 32)
        with torch.no_grad():
            layer.attention_weight.zero_()  # leaves the feed-forward alone
        loss = (layer((hidden,), {}).boundary[0] * gradient).sum()
        assert_same_training(loss, (reference(hidden) * gradient).sum(), matching)
