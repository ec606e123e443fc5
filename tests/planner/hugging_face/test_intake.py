"""Families of `config.json` files: exact parameters, the defaults taken, and a sentence for what no family has."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright import documents
from trainwright.families import T5, Bert, Gpt, Llama, Moe
from trainwright.families.fields import RotaryScaling
from trainwright.hugging_face import read_config
from trainwright.hugging_face.architectures import ARCHITECTURES, WITHOUT_FAMILY
from trainwright.layer import Attention
from trainwright.model import Model
from trainwright.training import Training, training_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False, "max_position_embeddings": 8192, "rope_theta": 5e5, "hidden_act": "silu",
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    "tie_word_embeddings": True, "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 24,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "sliding_window": None,
}  # fmt: skip
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64,
    "num_attention_heads": 64, "intermediate_size": 25600, "vocab_size": 151936, "head_dim": 128,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 6144,
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA3 = GEMMA2 | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
    "sliding_window": 1024, "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
OLMO2 = LLAMA | {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_key_value_heads": 32, "intermediate_size": 11008,
    "vocab_size": 100352,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
BERT = {
    "architectures": ["BertForPreTraining"], "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522, "type_vocab_size": 2,
}  # fmt: skip
ROBERTA = BERT | {
    "architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 50265, "type_vocab_size": 1,
    "max_position_embeddings": 514,
}  # fmt: skip
T5_LARGE = {
    "model_type": "t5", "d_model": 1024, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16, "d_kv": 64,
    "d_ff": 4096, "vocab_size": 32128, "relative_attention_num_buckets": 32,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "patch_size": 16, "image_size": 224, "id2label": {str(label): "" for label in range(1000)},
}  # fmt: skip
SWIN = {
    "model_type": "swin", "embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "window_size": 7,
    "patch_size": 4, "image_size": 224, "id2label": {str(label): "" for label in range(1000)},
}  # fmt: skip

OF_EVERY_CLASS = {
    "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0,
    "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict_in_generate": False, "suppress_tokens": None, "temperature": 1.0,
    "tf_legacy_loss": False, "tie_encoder_decoder": False, "top_k": 50, "top_p": 1.0, "torchscript": False,
    "typical_p": 1.0, "use_bfloat16": False, "output_scores": False,
}  # fmt: skip
"""Keys that transformers 4 writes for every class."""


@pytest.mark.parametrize(
    ("config", "tokens", "parameters"),
    [
        (LLAMA, 4096, 8_030_261_248),
        (QWEN, 4096, 494_032_768),
        (MIXTRAL, 4096, 46_702_792_704),
        (QWEN3, 4096, 32_762_123_264),
        (QWEN3_MOE, 4096, 30_532_122_624),
        (
            GEMMA2
            | {
                "model_type": "gemma",
                "architectures": None,
                "hidden_size": 3072,
                "num_hidden_layers": 28,
                "num_key_value_heads": 16,
                "intermediate_size": 24576,
            },
            4096,
            8_537_680_896,
        ),
        (OLMO2, 4096, 7_298_617_344),
        (OLMO2 | {"model_type": "olmo3", "architectures": None, "vocab_size": 100278}, 8192, 7_298_011_136),
        (GEMMA2, 4096, 9_241_705_984),
        (GEMMA3, 4096, 27_009_346_304),
        (GPT2, 1024, 124_439_808),
        (BERT, 512, 110_106_428),
        (ROBERTA, 512, 355_412_057 - 2_048),
        (T5_LARGE, 512, 737_668_096),
        (VIT, None, 304_326_632),
        (SWIN, None, 87_768_224),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_parameters_are_the_published_ones_less_what_a_remark_says(config, tokens, parameters) -> None:
    read = read_config(config, tokens=tokens)
    assert Model.of(read.family).parameters == parameters
    missing = {"roberta": "2,048"}.get(str(config["model_type"]))
    assert [remark for remark in read.remarks if "parameters" in remark] == (
        [] if missing is None else list(read.remarks)
    )
    assert missing is None or missing in read.remarks[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head_dim": 2.5}, "head_dim must be a whole number"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, but llama has SiLU"),
        ({"mlp_bias": True}, "mlp_bias is true, but llama has no biases"),
        ({"hidden_size": 7 * 10**15}, "llama.hidden_size must be at most 1,048,576, got 7000000000000000"),
        ({"q_lora_rank": 512}, "q_lora_rank 512 is not known of llama; leave out what changes no layer, or describe the model"),
        ({"num_local_experts": 8, "q_lora_rank": 512}, "num_local_experts 8, q_lora_rank 512 are not known of llama; leave"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification: llama is planned as LlamaForCausalLM"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be a whole number of at least 1, got '32'"),
        (QWEN | {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 12}, "max_window_layers, has full attention"),
        ({"model_type": "mistral", "architectures": None, "layer_types": ["full_attention", "sliding_attention"] * 16},
         "layer_types, or max_window_layers, has full attention elsewhere"),
        ({"text_config": {}}, "write its text_config into a file"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM (mamba) is not known"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_family_lacks_is_refused_by_field(change, sentence) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: ") as refusal:
        read_config(LLAMA | change, tokens=8192)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("model_type", sorted(WITHOUT_FAMILY))
def test_known_types_without_a_family_are_refused_by_what_they_have(model_type) -> None:
    with pytest.raises(ValueError, match="no family has that; describe the model as custom"):
        read_config({"model_type": model_type}, tokens=4096)
    assert model_type not in ARCHITECTURES


MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
IN_TURN = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "tokens", "windows"),
    [
        (MISTRAL, 8192, (4096, None)),
        (MISTRAL, 4096, (None, None)),
        (MISTRAL | {"sliding_window": None}, 8192, (None, None)),
        (MISTRAL | {"sliding_window": 512, "num_hidden_layers": 6, "layer_types": IN_TURN * 2}, 4096, (512, 3)),
        (LLAMA | {"model_type": "phi3", "architectures": None, "sliding_window": 2047}, 4096, (2047, None)),
        (QWEN | {"sliding_window": 1024}, 4096, (None, None)),
        (QWEN | {"sliding_window": 1024, "use_sliding_window": True}, 4096, (None, None)),
        (QWEN | {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 0}, 4096, (1024, None)),
        (QWEN3_MOE | {"sliding_window": 1024, "use_sliding_window": True}, 4096, (1024, None)),
    ],
    ids=["default", "longer", "null", "in turn", "phi", "unused", "from block 24 of 24", "from block 0", "experts"],
)
def test_a_window_counts_where_it_is_used_and_shorter_than_the_sequence(config, tokens, windows) -> None:
    family = read_config(config, tokens=tokens).family
    assert isinstance(family, Llama | Moe)
    assert (family.attention_window, family.full_attention_every) == windows


def test_biases_of_attention_are_those_of_its_inputs_and_a_remark_names_the_others() -> None:
    read = read_config(LLAMA | {"attention_bias": True}, tokens=4096)
    assert Model.of(read.family).parameters == 8_030_261_248 + 32 * (4096 + 2 * 1024)
    assert read.remarks == ("biases of attention's outputs are not counted: 131,072 parameters",)


def test_gemma_has_caps_scales_and_a_base_of_its_windows() -> None:
    second = read_config(GEMMA2, tokens=8192)
    assert isinstance(second.family, Llama)
    assert (second.family.logits_soft_cap, second.family.attention_scale, second.family.block_norms) == (
        30,
        None,
        "both",
    )
    assert (second.family.attention_window, second.family.full_attention_every) == (4096, 2)
    assert "attn_logit_softcapping 50 is left out" in second.remarks[0]
    without = read_config(GEMMA2 | {"final_logit_softcapping": None, "attn_logit_softcapping": None}, tokens=8192)
    assert isinstance(without.family, Llama)
    assert without.family.logits_soft_cap is None
    assert without.remarks == ()
    third = read_config(GEMMA3, tokens=512).family
    assert isinstance(third, Llama)
    assert third.attention_scale == 168**-0.5
    assert (third.attention_window, third.full_attention_every, third.window_rotary_base) == (1024, 6, 1e4)
    assert (third.rotary_base, third.rotary_scaling) == (1e6, RotaryScaling("linear", 8.0))
    by_kind = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e3}}
    named = read_config(
        GEMMA3 | {"rope_parameters": by_kind, "layer_types": ["sliding_attention"] * 62}, tokens=512
    ).family
    assert isinstance(named, Llama)
    assert (named.rotary_base, named.window_rotary_base, named.full_attention_every) == (5e5, 2e3, None)


def test_granite_has_the_multipliers_that_change_something() -> None:
    factors = {
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 16,
        "attention_multiplier": 0.0078125,
    }
    granite = LLAMA | {"model_type": "granite", "architectures": None}
    read = read_config(granite | factors, tokens=4096)
    assert isinstance(read.family, Llama)
    assert (read.family.embedding_multiplier, read.family.residual_multiplier) == (12, 0.22)
    assert (read.family.logits_multiplier, read.family.attention_scale) == (1 / 16, 0.0078125)
    assert read.remarks == ()
    plain = read_config(granite | {"attention_multiplier": 128**-0.5}, tokens=4096).family
    assert isinstance(plain, Llama)
    assert plain == read_config(LLAMA | {"rms_norm_eps": 1e-6}, tokens=4096).family


def test_olmo_normalises_over_the_width_and_after_its_branches() -> None:
    olmo = read_config(
        OLMO2 | {"model_type": "olmo3", "architectures": None, "sliding_window": 2048}, tokens=4096
    ).family
    assert isinstance(olmo, Llama)
    assert (olmo.query_key_norm, olmo.query_key_norm_over, olmo.block_norms) == (True, "width", "after")
    assert (olmo.attention_window, olmo.full_attention_every, olmo.window_rotary_base) == (2048, 4, 5e5)


def test_sequences_come_from_the_user_and_learned_positions_bound_them() -> None:
    with pytest.raises(ValueError, match="give --sequence-length"):
        read_config(GPT2)
    with pytest.raises(ValueError, match="give at most 1024"):
        read_config(GPT2, tokens=2048)
    shorter = read_config(GPT2, tokens=512)
    assert isinstance(shorter.family, Gpt)
    assert "393,216 parameters fewer" in shorter.remarks[0]
    longer = read_config(LLAMA, tokens=16384)
    assert "longer than max_position_embeddings 8192" in longer.remarks[0]


def test_defaults_that_were_taken_are_listed() -> None:
    config = {
        name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "tie_word_embeddings")
    }
    read = read_config(config, tokens=4096)
    assert isinstance(read.family, Llama)
    assert (read.family.key_value_heads, read.family.tied_embeddings) == (32, False)
    assert read.defaults == ("num_key_value_heads 32", "tie_word_embeddings false", "rms_norm_eps 1e-06")


LLAMA_31 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("change", "base", "scaling"),
    [
        ({}, 5e5, None),
        ({"rope_theta": None}, 1e4, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA_31}}, 5e5, RotaryScaling("llama3", 8.0)),
        (
            {"rope_parameters": {"rope_theta": 2e5, "rope_type": "llama3", **LLAMA_31}},
            2e5,
            RotaryScaling("llama3", 8.0),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 5e5, RotaryScaling("linear", 4.0)),
    ],
)
def test_rotary_angles_are_read_in_both_spellings(change, base, scaling) -> None:
    family = read_config(LLAMA | {"rms_norm_eps": 1e-5} | change, tokens=4096).family
    assert isinstance(family, Llama)
    assert (family.rotary_base, family.rotary_scaling, family.norm_epsilon) == (base, scaling, 1e-5)


def test_angles_that_no_family_has_are_remarked() -> None:
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5}
    read = read_config(LLAMA | scaled, tokens=4096)
    assert any("scaling yarn of rotary angles is left out" in remark for remark in read.remarks)
    assert any("partial_rotary_factor 0.5 is left out" in remark for remark in read.remarks)


def test_weight_of_the_balance_loss_is_read_even_if_it_is_zero() -> None:
    for weight in (0.0, 0.02):
        family = read_config(MIXTRAL | {"router_aux_loss_coef": weight}, tokens=4096).family
        assert isinstance(family, Moe)
        assert family.balance_loss_weight == weight
        training = training_of(family, {"global_batch_size": 8})
        assert documents.loads(documents.dumps(training), Training).family == family


@pytest.mark.parametrize(
    ("changes", "drops"),
    [
        ({}, True),
        ({"resid_pdrop": 0.0}, True),
        (dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), False),
    ],
)
def test_dropout_of_any_key_counts_also_by_default(changes, drops) -> None:
    family = read_config(GPT2 | changes, tokens=1024).family
    assert isinstance(family, Gpt)
    assert family.dropout is drops


def test_the_head_of_bert_decides_on_its_second_task() -> None:
    masked = read_config(BERT | {"architectures": ["BertForMaskedLM"]}, tokens=512).family
    both = read_config(BERT, tokens=512).family
    assert isinstance(masked, Bert)
    assert isinstance(both, Bert)
    assert (masked.next_sentence, both.next_sentence) == (False, True)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_defaults_are_those_of_the_configuration_classes(model_type) -> None:
    """A config with the sizes alone, and one with every key that transformers writes, are the same model."""
    transformers = pytest.importorskip("transformers")
    written: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict()
    written["architectures"] = [ARCHITECTURES[model_type].heads[0]]
    sizes = ("hidden_size n_embd n_embed d_model dim num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads "
             "num_heads intermediate_size moe_intermediate_size d_ff ffn_dim hidden_dim vocab_size n_positions max_position_embeddings embed_dim depths id2label")  # fmt: skip
    short = {name: value for name, value in written.items() if name in (*sizes.split(), "model_type", "architectures")}
    assert read_config(short, tokens=256).family == read_config(written, tokens=256).family


OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
    "num_attention_heads": 40, "vocab_size": 50272, "word_embed_proj_dim": 5120, "do_layer_norm_before": True,
    "max_position_embeddings": 2048, "activation_function": "relu", "layerdrop": 0.0,
}  # fmt: skip


def test_opt_has_the_published_parameters_less_two_positions() -> None:
    read = read_config(OPT, tokens=2048)
    assert isinstance(read.family, Gpt)
    assert (read.family.activation, read.family.dropout) == ("relu", True)
    assert Model.of(read.family).parameters == 12_853_473_280 - 2 * 5120
    assert "of 2050 learned positions, 2048 are counted: 10,240 parameters fewer" in read.remarks


NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
    "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432, "rotary_pct": 0.25, "max_position_embeddings": 2048,
    "use_parallel_residual": True, "tie_word_embeddings": False,
}  # fmt: skip
FALCON = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
    "num_attention_heads": 71, "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
    "new_decoder_architecture": False,
}  # fmt: skip
FALCON_40B = FALCON | {
    "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True,
}  # fmt: skip
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288,
    "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152, "rope_theta": 10_000.0,
    "sliding_window": 4096,
}  # fmt: skip
PHI_2 = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 51200, "partial_rotary_factor": 0.4,
}  # fmt: skip
PARALLEL = {"parallel_residual": True, "rotary_base": 10_000.0}


@pytest.mark.parametrize(
    ("config", "fields", "parameters"),
    [
        (NEOX, PARALLEL | {"rotary_size": 24, "tied_embeddings": False}, 20_554_567_680),
        (
            FALCON,
            PARALLEL | {"rotary_size": 64, "shared_norm": True, "key_value_heads": 1, "biases": False},
            6_921_720_704,
        ),
        (STARCODER2, {"rotary_size": 128, "rotary_base": 10_000.0, "key_value_heads": 2}, 3_030_371_328),
        (FALCON_40B, PARALLEL | {"rotary_size": 64, "key_value_heads": 8, "biases": False}, 41_303_293_952),
    ],
    ids=["gpt-neox-20b", "falcon-7b", "starcoder2-3b", "falcon-40b"],
)
def test_models_with_rotary_positions_have_the_published_parameters(config, fields, parameters) -> None:
    read = read_config(config, tokens=2048)
    layers, size, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    assert read.family == Gpt(layers, size, heads, 2048, config["vocab_size"], **fields)
    assert Model.of(read.family).parameters == parameters
    assert read.remarks == ()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (NEOX | {"attention_bias": False}, "gpt has biases in all of its products or in none"),
        (NEOX | {"intermediate_size": 20480}, "intermediate_size is 20480, but gpt has a feed-forward of 4 × 6144"),
        (NEOX | {"rotary_pct": 0.27}, "gpt.rotary_size must be even and at most 96"),
        (FALCON | {"alibi": True}, "alibi is true, but gpt has learned or rotary positions"),
        (STARCODER2 | {"sliding_window": 1024}, "sliding_window 1024 is not modelled in gpt"),
        (PHI_2 | {"qk_layernorm": True}, "gpt does not normalise queries and keys"),
    ],
)
def test_parallel_branches_of_another_shape_are_refused_by_field(config, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_config(config, tokens=2048)


def test_base_of_angles_is_read_in_both_spellings_and_their_scaling_remarked() -> None:
    old = read_config(
        NEOX | {"rotary_emb_base": 40_000, "rope_scaling": {"type": "linear", "factor": 2.0}}, tokens=4096
    )
    new = {"rope_theta": 40_000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
    family = read_config(NEOX | {"rotary_pct": None, "rope_parameters": new}, tokens=4096).family
    assert family == old.family
    assert isinstance(family, Gpt)
    assert (family.rotary_base, family.rotary_size) == (40_000.0, 24)
    assert old.remarks == (
        "sequences of 4096 tokens are longer than max_position_embeddings 2048",
        "scaling linear of rotary angles is left out, which changes neither time nor memory",
    )


def test_starcoder_has_one_head_of_keys_and_values_and_phi_biases_that_a_remark_counts() -> None:
    starcoder = GPT2 | {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "vocab_size": 49152}
    read = read_config(starcoder | {"n_positions": 8192}, tokens=8192)
    assert Model.of(read.family).parameters == 15_517_456_384
    assert read.remarks == ()
    phi = read_config(PHI_2, tokens=2048)
    assert Model.of(phi.family).parameters == 2_779_683_840 - 51_200
    assert phi.remarks == ("biases of its projection are not counted: 51,200 parameters",)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim is 512, but gpt's embedding is 5120 wide"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before is false, but gpt normalises before its branches"),
        ({"activation_function": "silu"}, "activation_function is silu, but gpt has relu or GELU"),
    ],
)
def test_opt_of_another_shape_is_refused_by_field(changes, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_config(OPT | changes, tokens=2048)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({"num_heads": 128, "d_kv": 128, "d_ff": 65536}, 11_307_321_344),  # T5-11B
        ({"d_model": 2048, "num_heads": 32, "d_ff": 5120, "feed_forward_proj": "gated-gelu"}, 2_783_959_040),
    ],
    ids=["wide heads", "gated"],
)
def test_t5_of_other_shapes_has_the_published_parameters(changes, parameters) -> None:
    read = read_config(T5_LARGE | changes, tokens=512)
    assert Model.of(read.family).parameters == parameters
    assert read.remarks == ()


def test_a_projection_of_its_own_is_the_files_and_remarked() -> None:
    read = read_config(T5_LARGE | {"tie_word_embeddings": False}, tokens=512)
    assert isinstance(read.family, T5)
    assert Model.of(read.family).parameters == 737_668_096 + 32128 * 1024
    assert "32,899,072 parameters of its own" in read.remarks[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj is gated-silu, but t5 has relu or gated-gelu"),
        ({"is_gated_act": True}, "is_gated_act is true, but feed_forward_proj relu is not"),
        ({"scale_decoder_outputs": False}, "scale_decoder_outputs is false, but t5 scales"),
    ],
)
def test_t5_with_other_products_is_refused_by_field(changes, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_config(T5_LARGE | changes, tokens=512)


def test_attention_with_alibi_stores_its_scores() -> None:
    bloom = {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}
    assert read_config(bloom, tokens=2048).attention is Attention.STORED
    assert read_config(GPT2, tokens=1024).attention is Attention.FUSED


MISSPELT = [
    (LLAMA, "tie_word_embeddings", "tie_word_embedding", "LlamaForCausalLM"),
    (
        T5_LARGE | {"feed_forward_proj": "gated-gelu"},
        "feed_forward_proj",
        "feedforward_proj",
        "T5ForConditionalGeneration",
    ),
    (T5_LARGE, "d_kv", "dkv", "T5ForConditionalGeneration"),
    (T5_LARGE, "num_decoder_layers", "num_decoders", "T5ForConditionalGeneration"),
    (NEOX | {"rotary_pct": 0.25}, "rotary_pct", "rotary_pcnt", "GPTNeoXForCausalLM"),
    (LLAMA, "rope_theta", "rope_tetha", "LlamaForCausalLM"),
]


@pytest.mark.parametrize(
    ("config", "name", "written", "head"), MISSPELT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_misspelt_key_is_refused_with_the_one_that_its_class_has(config, name, written, head) -> None:
    changed = {written if key == name else key: value for key, value in config.items()}
    with pytest.raises(
        ValueError, match=f"^config.json: {written}: there is no such key in {head}; did you mean {name}\\?$"
    ):
        read_config(changed, tokens=512)


def test_a_misspelt_key_is_refused_beside_the_right_one_but_no_key_that_is_less_alike() -> None:
    with pytest.raises(ValueError, match="tie_word_embedding: there is no such key"):
        read_config(LLAMA | {"tie_word_embedding": True}, tokens=512)
    read_config(LLAMA | {"attention_bias": False, "attention_out_bias": False}, tokens=512)


def test_a_misspelt_key_that_a_class_needs_is_named_beside_it() -> None:
    changed = {"hiden_size" if key == "hidden_size" else key: value for key, value in LLAMA.items()}
    with pytest.raises(ValueError, match=r"hidden_size is missing, .*; did you mean hidden_size for hiden_size\?$"):
        read_config(changed, tokens=512)


@pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN, MIXTRAL, QWEN3_MOE, GEMMA3, GPT2, BERT, T5_LARGE, VIT, SWIN],
    ids=lambda config: config["model_type"],
)
def test_keys_of_generation_and_of_every_class_are_not_taken_for_misspelt_ones(config) -> None:
    read_config(OF_EVERY_CLASS | config, tokens=512)


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (T5_LARGE | {"model_type": "mt5"}, "t5; if its layers are those of t5, write model_type t5"),
        (T5_LARGE | {"model_type": "mt5", "is_encoder_decoder": True},
         "t5; if its layers are those of t5, write model_type t5 and architectures [T5ForConditionalGeneration], else describe"),
        ({"model_type": "bart", "is_encoder_decoder": True, "d_model": 768, "num_hidden_layers": 6, "encoder_layers": 6},
         "t5, but encoder_layers, num_hidden_layers have no counterpart there, and num_heads, "),
        ({"model_type": "mamba", "hidden_size": 768, "n_layer": 24, "vocab_size": 50280, "state_size": 16, "conv_kernel": 4},
         "gpt, but conv_kernel, state_size have no counterpart there, and n_head is missing; describe the model as custom"),
        (QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632},
         "moe, but shared_expert_intermediate_size has no counterpart there; describe the model as custom"),
        (LLAMA | {"model_type": "nemotron", "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
         "llama, but hidden_act is relu2, but llama has SiLU; describe the model as custom"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_an_unknown_type_is_refused_with_the_nearest_family_and_what_that_lacks(config, advice) -> None:
    with pytest.raises(ValueError, match="is not known; the nearest family is ") as refusal:
        read_config({**config, "architectures": None}, tokens=512)
    assert advice in str(refusal.value)
    assert "use that" not in str(refusal.value)


def test_tokens_of_a_decoder_are_refused_where_a_model_has_no_encoder() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no decoder beside an encoder, .* of 8; leave it out"):
        read_config(LLAMA, tokens=512, decoder_tokens=8)
