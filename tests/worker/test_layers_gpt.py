"""GPT-2's layers: they equal Hugging Face's GPT-2 and OPT with the same weights, unsharded and tensor parallel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hugging_face import Same, WholeModel, assert_same_training
from tensor_group import passes, run_group, whole_gradients
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright_worker.layers.layer import Layer, Output
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

GPT = Gpt(layers=2, hidden_size=32, heads=4, sequence_length=16, vocabulary_size=64)
MODEL = Model.of(GPT)
ROWS = 3


def made(shard: TensorShard | None = None) -> list[Layer]:
    family, shared = make_family_layers(MODEL), {}
    return [
        family.make(layer, seed=1, shard=shard or TensorShard(), shared=shared) for layer in range(len(MODEL.layers))
    ]


def test_the_loss_is_hugging_faces_loss() -> None:
    layers = made()
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            activation_function="gelu",
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        theirs.transformer.wte.weight.copy_(layers[0].tokens)
        theirs.transformer.wpe.weight.copy_(layers[0].positions)
        for block, h in zip(layers[1:-1], theirs.transformer.h, strict=True):
            h.ln_1.weight.copy_(block.first_norm_weight)
            h.attn.c_attn.weight.copy_(block.qkv_weight.flatten(0, 1).T)
            h.attn.c_proj.weight.copy_(block.attention_weight.T)
            h.mlp.c_fc.weight.copy_(block.expand_weight.T)
            h.mlp.c_proj.weight.copy_(block.contract_weight.T)
            for linear in (h.attn.c_attn, h.attn.c_proj, h.mlp.c_fc, h.mlp.c_proj):
                linear.bias.zero_()
    rows = make_family_layers(MODEL).rows(("tokens", "targets"), seed=1, iteration=0, first=0, count=ROWS)
    output = Output(())
    for layer in layers:
        output = layer(output.boundary, rows)
    logits = theirs(input_ids=rows["tokens"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
    torch.testing.assert_close(output.loss / ROWS, expected)


def opt_pairs(ours: WholeModel, theirs: OPTForCausalLM) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    decoder = theirs.model.decoder
    yield Same(decoder.embed_tokens.weight, embedding.tokens)
    for block, layer in zip(blocks, decoder.layers, strict=True):
        yield from norm_pairs(layer.self_attn_layer_norm, block, "first_norm")
        attention = layer.self_attn
        for place, linear in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            yield Same(linear.weight, block.qkv_weight, lambda w, place=place: w[place])
            yield Same(linear.bias, block.qkv_bias, lambda w, place=place: w[place])
        yield from linear_pairs(attention.out_proj, block, "attention")
        yield from norm_pairs(layer.final_layer_norm, block, "second_norm")
        yield from linear_pairs(layer.fc1, block, "expand")
        yield from linear_pairs(layer.fc2, block, "contract")
    yield from norm_pairs(decoder.final_layer_norm, head, "norm")


def norm_pairs(theirs: torch.nn.LayerNorm, layer: Layer, name: str) -> Iterator[Same]:
    yield Same(theirs.weight, layer.get_parameter(f"{name}_weight"))
    yield Same(theirs.bias, layer.get_parameter(f"{name}_bias"))


def linear_pairs(theirs: torch.nn.Linear, layer: Layer, name: str) -> Iterator[Same]:
    yield Same(theirs.weight, layer.get_parameter(f"{name}_weight"))
    if theirs.bias is not None:
        yield Same(theirs.bias, layer.get_parameter(f"{name}_bias"))


def test_loss_and_gradients_with_a_relu_are_those_of_opt() -> None:
    opt = Gpt(2, 32, 4, 16, 64, activation="relu")
    ours = WholeModel(opt)
    theirs = OPTForCausalLM(
        OPTConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=128, num_attention_heads=4,
            max_position_embeddings=16, dropout=0, attn_implementation="eager",
        )
    )  # fmt: skip
    same = tuple(opt_pairs(ours, theirs))
    for pair in same:
        pair.copy()
    positions, first = theirs.model.decoder.embed_positions.weight, 2  # the first two are never read
    with torch.no_grad():
        positions[first:] = ours.layers[0].positions
    rows = ours.rows(ROWS)
    (loss,) = ours.losses(rows)
    logits = theirs(input_ids=rows["tokens"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
    assert_same_training(loss / ROWS, expected, same)
    torch.testing.assert_close(ours.layers[0].positions.grad, positions.grad[first:], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_shards_together_equal_the_block(degree: int) -> None:
    family = make_family_layers(MODEL)
    hidden, gradient = torch.randn(ROWS, 16, 32), torch.randn(ROWS, 16, 32)
    outputs, inputs, gradients = passes(made()[1], (hidden,), {}, (gradient,))
    ranks = run_group(lambda shard: family.make(1, seed=1, shard=shard, shared={}), degree, (hidden,), {}, (gradient,))
    for _, part_outputs, part_inputs, _ in ranks:
        torch.testing.assert_close(part_outputs, outputs)
        torch.testing.assert_close(part_inputs, inputs)
    found = whole_gradients(ranks)
    for name, expected in gradients.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
