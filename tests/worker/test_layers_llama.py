"""Llama's layers: they equal Hugging Face's Llama with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hugging_face import Same, WholeModel, assert_same_training
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainwright.families import Llama
from trainwright.families.fields import RotaryScaling
from trainwright.model import Model
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

ROWS = 3


def pairs(ours: WholeModel, theirs: Any) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    yield Same(theirs.model.embed_tokens.weight, embedding.tokens)
    for block, layer in zip(blocks, theirs.model.layers, strict=True):
        yield Same(layer.self_attn.q_proj.weight, block.query_weight)
        yield Same(layer.self_attn.k_proj.weight, block.key_weight)
        yield Same(layer.self_attn.v_proj.weight, block.value_weight)
        yield Same(layer.self_attn.o_proj.weight, block.attention_weight)
        if isinstance(theirs, Qwen2ForCausalLM):
            yield Same(layer.self_attn.q_proj.bias, block.query_bias)
            yield Same(layer.self_attn.k_proj.bias, block.key_bias)
            yield Same(layer.self_attn.v_proj.bias, block.value_bias)
        if isinstance(theirs, Qwen3ForCausalLM | Gemma3ForCausalLM):
            yield Same(layer.self_attn.q_norm.weight, block.query_norm_weight)
            yield Same(layer.self_attn.k_norm.weight, block.key_norm_weight)
        if isinstance(theirs, Olmo2ForCausalLM):
            yield Same(layer.self_attn.q_norm.weight, block.query_width_norm_weight)
            yield Same(layer.self_attn.k_norm.weight, block.key_width_norm_weight)
            yield Same(layer.post_attention_layernorm.weight, block.attention_output_norm_weight)
            yield Same(layer.post_feedforward_layernorm.weight, block.feed_forward_output_norm_weight)
        elif isinstance(theirs, Gemma2ForCausalLM | Gemma3ForCausalLM):
            yield Same(layer.input_layernorm.weight, block.attention_norm_weight)
            yield Same(layer.post_attention_layernorm.weight, block.attention_output_norm_weight)
            yield Same(layer.pre_feedforward_layernorm.weight, block.feed_forward_norm_weight)
            yield Same(layer.post_feedforward_layernorm.weight, block.feed_forward_output_norm_weight)
        else:
            yield Same(layer.input_layernorm.weight, block.attention_norm_weight)
            yield Same(layer.post_attention_layernorm.weight, block.feed_forward_norm_weight)
        yield Same(layer.mlp.gate_proj.weight, block.expand_weight, lambda w: w[0])
        yield Same(layer.mlp.up_proj.weight, block.expand_weight, lambda w: w[1])
        yield Same(layer.mlp.down_proj.weight, block.contract_weight)
    yield Same(theirs.model.norm.weight, head.norm_weight)
    yield Same(theirs.lm_head.weight, head.tokens)


def subtract_one(theirs: PreTrainedModel) -> None:
    """Subtract from the weights of Gemma's norms the 1 that they add: a training without weight decay is the same."""
    with torch.no_grad():
        for module in theirs.modules():
            if type(module).__name__.startswith("Gemma") and type(module).__name__.endswith("RMSNorm"):
                module.weight.sub_(1)


def angles(llama: Llama) -> dict[str, Any]:
    """Return transformers' `rope_parameters`, in Gemma 3 by kind of block."""
    if llama.window_rotary_base is not None:
        full = angles(replace(llama, window_rotary_base=None))
        return {
            "full_attention": full,
            "sliding_attention": {"rope_theta": llama.window_rotary_base, "rope_type": "default"},
        }
    parameters: dict[str, Any] = {"rope_theta": llama.rotary_base or 10000.0, "rope_type": "default"}
    scaling = llama.rotary_scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return parameters


def windows(llama: Llama) -> dict[str, Any]:
    """Return transformers' window, and the kinds of blocks where not all have it."""
    if llama.full_attention_every is None:
        return {"sliding_window": llama.attention_window}
    numbers = range(1, llama.layers + 1)
    kinds = ["sliding_attention" if number % llama.full_attention_every else "full_attention" for number in numbers]
    return {"sliding_window": llama.attention_window, "use_sliding_window": True, "layer_types": kinds}


def beyond(llama: Llama) -> dict[str, Any]:
    """Return what the configs of Granite and Gemma have beside the sizes."""
    if llama.residual_multiplier is not None:
        return {
            "embedding_multiplier": llama.embedding_multiplier,
            "residual_multiplier": llama.residual_multiplier,
            "logits_scaling": 1 / (llama.logits_multiplier or 1),
            "attention_multiplier": llama.attention_scale,
        }
    if llama.activation != "gelu":
        return {}
    scale = llama.attention_scale
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": llama.logits_soft_cap,
        "attn_logit_softcapping": None,  # which our worker has not
        "query_pre_attn_scalar": llama.head_size if scale is None else round(scale**-2),
        "pad_token_id": None,
    }


SMALL = Llama(1, 32, 4, 16, 64, 40, 2)
GEMMA = replace(
    SMALL, key_value_heads=1, head_size=10, tied_embeddings=True, activation="gelu", embedding_multiplier=32**0.5
)
GEMMA2 = replace(
    GEMMA,
    layers=2,
    block_norms="both",
    logits_soft_cap=2.0,
    attention_scale=0.25,
    attention_window=5,
    full_attention_every=2,
)
GEMMA3 = replace(
    GEMMA2,
    logits_soft_cap=None,
    query_key_norm=True,
    rotary_base=1000.0,
    rotary_scaling=RotaryScaling("linear", 4.0),
    window_rotary_base=100.0,
)
GRANITE = replace(
    SMALL, embedding_multiplier=12.0, residual_multiplier=0.22, logits_multiplier=0.25, attention_scale=0.5
)
CASES: dict[str, tuple[Llama, type[PreTrainedModel], type[PreTrainedConfig]]] = {
    "grouped": (replace(SMALL, layers=2), LlamaForCausalLM, LlamaConfig),
    "tied": (replace(SMALL, key_value_heads=None, tied_embeddings=True), LlamaForCausalLM, LlamaConfig),
    "base and epsilon": (replace(SMALL, rotary_base=500.0, norm_epsilon=0.1), LlamaForCausalLM, LlamaConfig),
    "llama 3.1": (
        replace(SMALL, hidden_size=64, heads=2, rotary_scaling=RotaryScaling("llama3", 8.0, original_positions=64)),
        LlamaForCausalLM,
        LlamaConfig,
    ),
    "linear": (replace(SMALL, rotary_scaling=RotaryScaling("linear", 4.0)), LlamaForCausalLM, LlamaConfig),
    "mistral": (replace(SMALL, attention_window=5), MistralForCausalLM, MistralConfig),
    "qwen2": (replace(SMALL, query_key_value_bias=True), Qwen2ForCausalLM, Qwen2Config),
    "window in turn": (
        replace(SMALL, layers=2, query_key_value_bias=True, attention_window=5, full_attention_every=2),
        Qwen2ForCausalLM,
        Qwen2Config,
    ),
    "qwen3": (replace(SMALL, hidden_size=20, head_size=6, query_key_norm=True), Qwen3ForCausalLM, Qwen3Config),
    "olmo2": (
        replace(SMALL, query_key_norm=True, query_key_norm_over="width", block_norms="after"),
        Olmo2ForCausalLM,
        Olmo2Config,
    ),
    "granite": (GRANITE, GraniteForCausalLM, GraniteConfig),
    "gemma": (GEMMA, GemmaForCausalLM, GemmaConfig),
    "gemma2": (GEMMA2, Gemma2ForCausalLM, Gemma2Config),
    "gemma3": (GEMMA3, Gemma3ForCausalLM, Gemma3TextConfig),
    "gemma3 within its window": (replace(GEMMA3, attention_window=16), Gemma3ForCausalLM, Gemma3TextConfig),
}


@pytest.mark.parametrize(("llama", "model", "config"), CASES.values(), ids=CASES)
def test_loss_and_gradients_are_hugging_faces(
    llama: Llama, model: type[PreTrainedModel], config: type[PreTrainedConfig]
) -> None:
    ours = WholeModel(llama)
    theirs = model(
        config(
            vocab_size=llama.vocabulary_size,
            hidden_size=llama.hidden_size,
            intermediate_size=llama.feed_forward_size,
            num_hidden_layers=llama.layers,
            num_attention_heads=llama.heads,
            num_key_value_heads=llama.key_value_heads,
            head_dim=llama.head_size or llama.hidden_size // llama.heads,
            rms_norm_eps=llama.norm_epsilon or 1e-6,
            rope_parameters=angles(llama),
            tie_word_embeddings=llama.tied_embeddings,
            **windows(llama),
            **beyond(llama),
            attn_implementation="eager",
        )
    )
    same = tuple(pairs(ours, theirs))
    for pair in same:
        pair.copy()
    subtract_one(theirs)
    rows = ours.rows(ROWS)
    (loss,) = ours.losses(rows)
    logits = theirs(input_ids=rows["tokens"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
    assert_same_training(loss / ROWS, expected, same)


def test_a_later_token_does_not_change_an_earlier_one() -> None:
    ours = WholeModel(Llama(1, 32, 4, 16, 64, intermediate_size=40))
    hidden = torch.randn(1, 16, 32)
    changed = hidden.clone()
    changed[:, 10:] += 1
    before, after = (ours.layers[1]((values,), {}).boundary[0] for values in (hidden, changed))
    torch.testing.assert_close(after[:, :10], before[:, :10])
    assert not torch.allclose(after[:, 10:], before[:, 10:])


def test_heads_of_odd_size_are_refused() -> None:
    layers = make_family_layers(Model.of(Llama(1, 6, 2, 16, 64, intermediate_size=8)))
    with pytest.raises(ValueError, match="even"):
        layers.make(1, seed=1, shard=TensorShard(), shared={})
