"""GPT-2's layers: they equal those of Hugging Face's models with the same weights, unsharded and tensor parallel."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hugging_face import Same, WholeModel, assert_same_training
from tensor_group import Meeting, Thread, passes, run_group, whole_gradients
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

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


def joined(block: Layer, kind: str, groups: int, *, of_gradients: bool = False) -> torch.Tensor:
    """Return queries, keys and values as transformers joins them: by group of heads that share keys and values."""
    parts = [block.get_parameter(f"{name}_{kind}") for name in ("query", "key", "value")]
    given = [part.grad if of_gradients else part for part in parts]
    return torch.cat([torch.unflatten(part, 0, (groups, -1)) for part in given], 1).flatten(0, 1)


def neox_pairs(ours: WholeModel, theirs: GPTNeoXForCausalLM) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    yield Same(theirs.gpt_neox.embed_in.weight, embedding.tokens)
    yield Same(theirs.get_output_embeddings().weight, head.tokens)
    for block, layer in zip(blocks, theirs.gpt_neox.layers, strict=True):
        yield from norm_pairs(layer.input_layernorm, block, "first_norm")
        yield from norm_pairs(layer.post_attention_layernorm, block, "second_norm")
        yield from linear_pairs(layer.attention.dense, block, "attention")
        yield from linear_pairs(layer.mlp.dense_h_to_4h, block, "expand")
        yield from linear_pairs(layer.mlp.dense_4h_to_h, block, "contract")
    yield from norm_pairs(theirs.gpt_neox.final_layer_norm, head, "norm")


def falcon_pairs(ours: WholeModel, theirs: FalconForCausalLM) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    yield Same(theirs.transformer.word_embeddings.weight, embedding.tokens)
    for block, layer in zip(blocks, theirs.transformer.h, strict=True):
        if hasattr(layer, "ln_mlp"):
            yield from norm_pairs(layer.ln_attn, block, "first_norm")
            yield from norm_pairs(layer.ln_mlp, block, "second_norm")
        else:
            yield from norm_pairs(layer.input_layernorm, block, "first_norm")
        yield from linear_pairs(layer.self_attention.dense, block, "attention")
        yield from linear_pairs(layer.mlp.dense_h_to_4h, block, "expand")
        yield from linear_pairs(layer.mlp.dense_4h_to_h, block, "contract")
    yield from norm_pairs(theirs.transformer.ln_f, head, "norm")


NEOX = Gpt(2, 32, 4, 16, 64, rotary_size=2, rotary_base=500.0, parallel_residual=True, tied_embeddings=False)
FALCON = Gpt(2, 32, 4, 16, 64, rotary_size=8, parallel_residual=True, shared_norm=True, key_value_heads=1, biases=False)


def same_as_neox(gpt: Gpt) -> GPTNeoXForCausalLM:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            rope_parameters={"rope_type": "default", "rope_theta": gpt.rotary_base, "partial_rotary_factor": 0.25},
            use_parallel_residual=gpt.parallel_residual, attn_implementation="eager",
        )
    )  # fmt: skip


def same_as_falcon(gpt: Gpt) -> FalconForCausalLM:
    return FalconForCausalLM(
        FalconConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, attn_implementation="eager",
            num_kv_heads=gpt.key_value_heads, new_decoder_architecture=not gpt.shared_norm,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "gpt",
    [NEOX, replace(NEOX, parallel_residual=False), FALCON, replace(FALCON, shared_norm=False, key_value_heads=2)],
    ids=["neox", "one after the other", "falcon 7b", "falcon 40b"],
)
def test_loss_and_gradients_are_those_of_gpt_neox_and_falcon(gpt: Gpt) -> None:
    ours, groups = WholeModel(gpt), gpt.key_value_heads or gpt.heads
    theirs = same_as_neox(gpt) if gpt.biases else same_as_falcon(gpt)
    if isinstance(theirs, GPTNeoXForCausalLM):
        same = tuple(neox_pairs(ours, theirs))
        products = [layer.attention.query_key_value for layer in theirs.gpt_neox.layers]
    else:
        same = tuple(falcon_pairs(ours, theirs))
        products = [layer.self_attention.query_key_value for layer in theirs.transformer.h]
    joint = [
        (parameter, block, kind)
        for product, block in zip(products, ours.layers[1:-1], strict=True)
        for kind, parameter in product.named_parameters()
    ]
    for pair in same:
        pair.copy()
    with torch.no_grad():
        for parameter, block, kind in joint:
            parameter.copy_(joined(block, kind, groups))
    rows = ours.rows(ROWS)
    (loss,) = ours.losses(rows)
    logits = theirs(input_ids=rows["tokens"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
    assert_same_training(loss / ROWS, expected, same)
    for parameter, block, kind in joint:
        torch.testing.assert_close(joined(block, kind, groups, of_gradients=True), parameter.grad, rtol=1e-3, atol=1e-5)


STARCODER2 = Gpt(2, 32, 4, 16, 64, rotary_size=8, key_value_heads=2)
PHI = Gpt(2, 32, 4, 16, 64, rotary_size=4, parallel_residual=True, shared_norm=True, tied_embeddings=False)


def starcoder2_pairs(ours: WholeModel, theirs: Starcoder2ForCausalLM) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    yield Same(theirs.model.embed_tokens.weight, embedding.tokens)
    for block, layer in zip(blocks, theirs.model.layers, strict=True):
        yield from norm_pairs(layer.input_layernorm, block, "first_norm")
        yield from norm_pairs(layer.post_attention_layernorm, block, "second_norm")
        for name in ("query", "key", "value"):
            yield from linear_pairs(getattr(layer.self_attn, f"{name[0]}_proj"), block, name)
        yield from linear_pairs(layer.self_attn.o_proj, block, "attention")
        yield from linear_pairs(layer.mlp.c_fc, block, "expand")
        yield from linear_pairs(layer.mlp.c_proj, block, "contract")
    yield from norm_pairs(theirs.model.norm, head, "norm")


def phi_pairs(ours: WholeModel, theirs: PhiForCausalLM) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    yield Same(theirs.model.embed_tokens.weight, embedding.tokens)
    yield Same(theirs.lm_head.weight, head.tokens)
    for block, layer in zip(blocks, theirs.model.layers, strict=True):
        yield from norm_pairs(layer.input_layernorm, block, "first_norm")
        for name in ("query", "key", "value"):
            yield from linear_pairs(getattr(layer.self_attn, f"{name[0]}_proj"), block, name)
        yield from linear_pairs(layer.self_attn.dense, block, "attention")
        yield from linear_pairs(layer.mlp.fc1, block, "expand")
        yield from linear_pairs(layer.mlp.fc2, block, "contract")
    yield from norm_pairs(theirs.model.final_layernorm, head, "norm")


@pytest.mark.parametrize("gpt", [STARCODER2, PHI], ids=["starcoder2", "phi"])
def test_loss_and_gradients_are_those_of_starcoder2_and_phi(gpt: Gpt) -> None:
    ours = WholeModel(gpt)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "hidden_act": "gelu", "attn_implementation": "eager",
    }  # fmt: skip
    if gpt is PHI:
        theirs = PhiForCausalLM(PhiConfig(**sizes))
        torch.nn.init.zeros_(theirs.lm_head.bias)
        same = tuple(phi_pairs(ours, theirs))
    else:
        theirs = Starcoder2ForCausalLM(Starcoder2Config(**sizes, bos_token_id=0, eos_token_id=0))
        same = tuple(starcoder2_pairs(ours, theirs))
    for pair in same:
        pair.copy()
    rows = ours.rows(ROWS)
    (loss,) = ours.losses(rows)
    logits = theirs(input_ids=rows["tokens"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
    assert_same_training(loss / ROWS, expected, same)


@pytest.mark.parametrize("gpt", [NEOX, replace(FALCON, key_value_heads=2)], ids=["two norms", "one norm"])
def test_parallel_branches_divided_by_sequence_equal_the_block(gpt: Gpt) -> None:
    family = make_family_layers(Model.of(gpt))
    hidden, gradient = torch.randn(ROWS, 16, 32), torch.randn(ROWS, 16, 32)
    whole = family.make(1, seed=1, shard=TensorShard(), shared={})
    (output,), (of_input,), gradients = passes(whole, (hidden,), {}, (gradient,))
    meeting = Meeting(2)

    def run(index: int) -> tuple[Layer, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], dict]:
        shard = TensorShard(index, 2, Thread(meeting, index, 2), sequence_parallel=True)
        layer = family.make(1, seed=1, shard=shard, shared={})
        return layer, *passes(layer, (hidden.chunk(2, 1)[index],), {}, (gradient.chunk(2, 1)[index],))

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(run, range(2)))
    torch.testing.assert_close(torch.cat([outputs[0] for _, outputs, _, _ in ranks], 1), output)
    torch.testing.assert_close(torch.cat([inputs[0] for _, _, inputs, _ in ranks], 1), of_input)
    for name, expected in gradients.items():
        parts = [found[name] for *_, found in ranks]
        dimension = whole.split_dimensions.get(name)
        found = sum(parts) if dimension is None else torch.cat(parts, dimension)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


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
