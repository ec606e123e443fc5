"""Readers of decoders with the norms of GPT-2: their keys become fields of `gpt`."""

from __future__ import annotations

from typing import Any

from trainwright.families import Gpt
from trainwright.families.fields import ROTARY_BASE
from trainwright.hugging_face.config import GELU, Config
from trainwright.hugging_face.rotary_keys import note_scaling, rotary_keys, scaling_kind


def read_gpt2(config: Config) -> Gpt:
    """Return GPT-2."""
    return Gpt(**_gpt2_fields(config))


def read_bigcode(config: Config) -> Gpt:
    """Return StarCoder: GPT-2 with one head of keys and values."""
    config.skip("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads", "max_batch_size")
    return Gpt(**_gpt2_fields(config), key_value_heads=1 if config.flag("multi_query", default=True) else None)


def _gpt2_fields(config: Config) -> dict[str, Any]:
    hidden, tokens = config.number("n_embd", "hidden_size"), config.sequence()
    entries = config.number("n_positions", "max_position_embeddings", default=1024)
    config.check_positions(entries)
    if entries > tokens:
        config.remarks.append(
            f"of {entries} learned positions, {tokens} are counted: {(entries - tokens) * hidden:,} parameters fewer"
        )
    _demand_widths(config, hidden, "n_inner")
    config.demand("activation_function", *GELU, lack="gpt has GELU")
    config.demand("add_cross_attention", False, lack="gpt has no second input")
    return {
        **_sizes(config, hidden, tied=True),
        "dropout": config.drops("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
    }


def read_opt(config: Config) -> Gpt:
    """Return OPT, whose feed-forward has a ReLU."""
    hidden, tokens = config.number("hidden_size"), config.sequence()
    entries = config.number("max_position_embeddings", default=2048)
    config.check_positions(entries)
    beyond = entries + 2 - tokens  # transformers counts positions from 2
    config.remarks.append(
        f"of {entries + 2} learned positions, {tokens} are counted: {beyond * hidden:,} parameters fewer"
    )
    _demand_widths(config, hidden, "ffn_dim")
    config.demand("word_embed_proj_dim", hidden, lack=f"gpt's embedding is {hidden} wide")
    config.demand("do_layer_norm_before", True, lack="gpt normalises before its branches")
    config.demand("_remove_final_layer_norm", False, lack="gpt has a final norm")
    config.demand("layer_norm_elementwise_affine", True, lack="gpt's norms have weights")
    config.demand("layerdrop", 0, lack="gpt trains every layer")
    config.skip("init_std")
    activation: Any = config.value("activation_function", default="relu")
    if activation not in ("relu", *GELU):
        config.lacks.append(f"activation_function is {activation}, but gpt has relu or GELU")
    drops = config.drops("dropout", default=0.1) | config.drops("attention_dropout", default=0.0)
    return Gpt(
        **_sizes(config, hidden, tied=True),
        activation="relu" if activation == "relu" else None,
        biases=config.flag("enable_bias", default=True),
        dropout=drops,
    )


def read_bloom(config: Config) -> Gpt:
    """Return BLOOM, whose ALiBi and embedding norm `gpt` does not have."""
    hidden, tokens = config.number("hidden_size", "n_embed"), config.sequence()
    config.skip("seq_length", "attention_softmax_in_fp32")
    config.remarks.append(
        f"it has ALiBi in place of gpt's {tokens * hidden:,} learned positions, and {2 * hidden:,} parameters of an embedding norm"
    )
    config.remarks.append(
        "attention stores its scores, since fused kernels have no ALiBi; for kernels that have it give the model's document"
    )
    return Gpt(
        **_sizes(config, hidden, tied=True), dropout=config.drops("hidden_dropout", "attention_dropout", default=0.0)
    )


def read_gpt_neox(config: Config) -> Gpt:
    """Return GPT-NeoX or Pythia."""
    hidden = config.number("hidden_size")
    _demand_widths(config, hidden, "intermediate_size")
    config.demand("hidden_act", *GELU, lack="gpt has GELU")
    config.demand("attention_bias", True, lack="gpt has biases in all of its products or in none")
    return Gpt(
        **_sizes(config, hidden, tied=False),
        **_rotary_part(config, hidden, share=0.25),
        parallel_residual=config.flag("use_parallel_residual", default=True),
        dropout=config.drops("hidden_dropout", "attention_dropout", default=0.0),
    )


def read_falcon(config: Config) -> Gpt:
    """Return Falcon, with one norm a block as in 7B, or with two as in 40B."""
    hidden, heads = config.number("hidden_size", "n_embed"), config.number("num_attention_heads", "n_head")
    _demand_widths(config, hidden, "ffn_hidden_size")
    config.demand("activation", *GELU, lack="gpt has GELU")
    config.demand("alibi", False, lack="gpt has learned or rotary positions")
    is_new = config.flag("new_decoder_architecture", default=False)
    is_parallel = config.flag("parallel_attn", default=True) or is_new
    is_shared = config.flag("multi_query", default=True) and not is_new
    norms: Any = config.value("num_ln_in_parallel_attn", default=2 if is_new else None)
    groups = config.number("num_kv_heads", "n_head_kv", default=heads) if is_new else 1 if is_shared else heads
    config.skip("num_kv_heads", "n_head_kv")
    return Gpt(
        **_sizes(config, hidden, tied=True),
        **_rotary_part(config, hidden, share=1.0),
        parallel_residual=is_parallel,
        shared_norm=is_parallel and not (is_new and norms == 2),
        key_value_heads=groups,
        biases=config.flag("bias", default=False),
        dropout=config.drops("hidden_dropout", "attention_dropout", default=0.0),
    )


def read_starcoder2(config: Config) -> Gpt:
    """Return StarCoder 2."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    _demand_widths(config, hidden, "intermediate_size")
    config.demand("head_dim", hidden // heads, lack=f"gpt's heads are {hidden // heads} wide")
    config.demand("hidden_act", *GELU, lack="gpt has GELU")
    window: Any = config.value("sliding_window", default=None)
    if isinstance(window, int) and window < config.sequence():
        config.lacks.append(
            f"sliding_window {window} is not modelled in gpt, and sequences of {config.sequence()} are longer; give a "
            f"--sequence-length of at most {window}"
        )
    return Gpt(
        **_sizes(config, hidden, tied=True),
        **_rotary_part(config, hidden, share=1.0),
        key_value_heads=config.number("num_key_value_heads", default=2),
        biases=config.flag("use_bias", default=True),
        dropout=config.drops("residual_dropout", "embedding_dropout", "attention_dropout", default=0.0),
    )


def read_phi(config: Config) -> Gpt:
    """Return Phi 1 or 2, whose projection onto the vocabulary has biases, which `gpt` does not have."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    _demand_widths(config, hidden, "intermediate_size")
    config.demand("hidden_act", *GELU, lack="gpt has GELU")
    config.demand("qk_layernorm", False, lack="gpt does not normalise queries and keys")
    fields = _sizes(config, hidden, tied=False)
    config.remarks.append(f"biases of its projection are not counted: {fields['vocabulary_size']:,} parameters")
    return Gpt(
        **fields,
        **_rotary_part(config, hidden, share=0.5),
        parallel_residual=True,
        shared_norm=True,
        key_value_heads=config.number("num_key_value_heads", default=heads),
        dropout=config.drops("resid_pdrop", "embd_pdrop", "attention_dropout", default=0.0),
    )


def _sizes(config: Config, hidden: int, *, tied: bool) -> dict[str, Any]:
    """Return the fields that all of these models have; `tied`: whether their class ties the projection by default."""
    return {
        "layers": config.number("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "heads": config.number("n_head", "num_attention_heads"),
        "sequence_length": config.sequence(),
        "vocabulary_size": config.number("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=tied),
    }


def _demand_widths(config: Config, hidden: int, key: str) -> None:
    config.demand(key, 4 * hidden, lack=f"gpt has a feed-forward of 4 × {hidden}")


def _rotary_part(config: Config, hidden: int, *, share: float) -> dict[str, Any]:
    """Return how many values of a head are rotated, and the base of their angles; `share`: that of its class by default."""
    config.note_positions()
    given = rotary_keys(config, "rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct")
    if given is None:
        return {}
    base = given.share("rope_theta", "rotary_emb_base", default=ROTARY_BASE)
    turned = given.share("partial_rotary_factor", "rotary_pct", default=share)
    config.defaults += given.defaults
    note_scaling(config, scaling_kind(given))
    size = hidden // config.number("n_head", "num_attention_heads")
    return {"rotary_size": int(size * turned), "rotary_base": base}
