"""Architectures of transformers: how the keys of their `config.json` become fields of a family.

Defaults of absent keys are those of transformers' configuration classes, version 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from trainwright.families import T5, Bert, Family, Swin, Vit
from trainwright.hugging_face import gpt_decoders
from trainwright.hugging_face.config import GELU, Config
from trainwright.hugging_face.rotary_decoders import RotaryDecoder, gemma_reader, llama_reader, moe_reader
from trainwright.layer import Attention

_BERT_DROPOUTS: Final = "hidden_dropout_prob", "attention_probs_dropout_prob"


@dataclass(frozen=True)
class Architecture:
    """Model type of transformers.

    Attributes:
        heads: classes whose head a family has.
        read: from a config to the family.
        attention: of the model in transformers, where fused kernels lack a part of it.
    """

    heads: tuple[str, ...]
    read: Callable[[Config], Family]
    attention: Attention = Attention.FUSED


def _bert(*dropouts: str, types: int, positions_before: int = 0) -> Callable[[Config], Family]:
    def read(config: Config) -> Family:
        tokens = config.sequence()
        entries = config.number("max_position_embeddings", default=512 + positions_before) - positions_before
        hidden = config.number("hidden_size", "dim")
        config.check_positions(entries)
        missing = (entries + positions_before - tokens) * hidden
        if missing:
            config.remarks.append(f"of its learned positions {tokens} are counted: {missing:,} parameters fewer")
        config.demand("hidden_act", *GELU, lack="bert has GELU")
        config.demand("activation", *GELU, lack="bert has GELU")
        config.demand("tie_word_embeddings", True, lack="bert projects with its token embedding")
        config.demand("sinusoidal_pos_embds", False, lack="bert learns its positions")
        config.demand("position_embedding_type", "absolute", lack="bert learns its positions")
        config.demand("add_cross_attention", False, lack="bert has no second input")
        if not types:
            config.remarks.append(f"it has no token types, of which bert has at least one: {hidden:,} parameters more")
        return Bert(
            layers=config.number("num_hidden_layers", "n_layers"),
            hidden_size=hidden,
            heads=config.number("num_attention_heads", "n_heads"),
            sequence_length=tokens,
            vocabulary_size=config.number("vocab_size"),
            intermediate_size=config.number("intermediate_size", "hidden_dim"),
            token_types=config.number("type_vocab_size", default=types) if types else 1,
            next_sentence=config.head == "BertForPreTraining",
            dropout=config.drops(*dropouts, default=0.1),
        )

    return read


def _t5(config: Config) -> Family:
    hidden, heads = config.number("d_model"), config.number("num_heads")
    size = config.number("d_kv", default=64)
    kind = config.value("feed_forward_proj", default="relu")
    if kind not in ("relu", "gated-gelu"):
        config.lacks.append(f"feed_forward_proj is {kind}, but t5 has relu or gated-gelu")
    is_gated = kind == "gated-gelu"
    config.demand("is_gated_act", is_gated, lack=f"feed_forward_proj {kind} is not")
    vocabulary = config.number("vocab_size")
    is_tied = config.flag("tie_word_embeddings", default=True)
    config.demand(
        "scale_decoder_outputs", is_tied, lack="t5 scales its output where the projection is the token embedding"
    )
    if not is_tied:
        config.remarks.append(
            f"its projection has {vocabulary * hidden:,} parameters of its own, as the file says; transformers 5 uses the token embedding"
        )
    layers = config.number("num_layers")
    return T5(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        sequence_length=config.sequence(),
        vocabulary_size=vocabulary,
        decoder_layers=config.number("num_decoder_layers", default=layers),
        decoder_sequence_length=config.decoder_tokens,
        intermediate_size=config.number("d_ff"),
        position_buckets=config.number("relative_attention_num_buckets", default=32),
        head_size=None if heads * size == hidden else size,
        gated=is_gated,
        tied_embeddings=is_tied,
        dropout=config.drops("dropout_rate", default=0.1),
    )


def _vit(config: Config) -> Family:
    config.demand("hidden_act", *GELU, lack="vit has GELU")
    config.demand("qkv_bias", True, lack="vit has biases")
    config.note_dropout("hidden_dropout_prob", "attention_probs_dropout_prob")
    config.skip("pooler_output_size", "pooler_act")
    return Vit(
        layers=config.number("num_hidden_layers"),
        hidden_size=config.number("hidden_size"),
        heads=config.number("num_attention_heads"),
        image_size=config.number("image_size", default=224),
        patch_size=config.number("patch_size", default=16),
        channels=config.number("num_channels", default=3),
        classes=_classes(config),
        intermediate_size=config.number("intermediate_size"),
    )


def _swin(config: Config) -> Family:
    config.demand("hidden_act", *GELU, lack="swin has GELU")
    config.demand("mlp_ratio", 4.0, lack="swin's feed-forward is four times as wide")
    config.demand("qkv_bias", True, lack="swin has biases")
    config.demand("use_absolute_embeddings", False, lack="swin has no absolute positions")
    config.skip(
        "path_norm", "drop_path_rate", "out_features", "out_indices", "stage_names", "hidden_size", "num_layers"
    )
    config.note_dropout("hidden_dropout_prob", "attention_probs_dropout_prob")
    return Swin(
        layers=config.numbers("depths", default=(2, 2, 6, 2)),
        hidden_size=config.number("embed_dim", default=96),
        heads=config.numbers("num_heads", default=(3, 6, 12, 24)),
        image_size=config.number("image_size", default=224),
        patch_size=config.number("patch_size", default=4),
        window_size=config.number("window_size", default=7),
        channels=config.number("num_channels", default=3),
        classes=_classes(config),
    )


def _classes(config: Config) -> int:
    named: Any = config.keys.get("id2label")
    count: Any = config.keys.get("num_labels") or (len(named) if isinstance(named, Mapping) else None)
    if isinstance(count, int) and count > 0:
        return count
    config.defaults.append("id2label of 2 classes")
    return 2


ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "gpt2": Architecture(("GPT2LMHeadModel",), gpt_decoders.read_gpt2),
        "gpt_bigcode": Architecture(("GPTBigCodeForCausalLM",), gpt_decoders.read_bigcode),
        "starcoder2": Architecture(("Starcoder2ForCausalLM",), gpt_decoders.read_starcoder2),
        "phi": Architecture(("PhiForCausalLM",), gpt_decoders.read_phi),
        "opt": Architecture(("OPTForCausalLM",), gpt_decoders.read_opt),
        "gpt_neox": Architecture(("GPTNeoXForCausalLM",), gpt_decoders.read_gpt_neox),
        "falcon": Architecture(("FalconForCausalLM",), gpt_decoders.read_falcon),
        "bloom": Architecture(("BloomForCausalLM",), gpt_decoders.read_bloom, Attention.STORED),
        "llama": Architecture(("LlamaForCausalLM",), llama_reader()),
        "mistral": Architecture(("MistralForCausalLM",), llama_reader(RotaryDecoder(key_value_heads=8, window=4096))),
        "qwen2": Architecture(
            ("Qwen2ForCausalLM",),
            llama_reader(
                RotaryDecoder(key_value_heads=32, window=4096, window_needs_use=True, window_from=28, has_biases=True)
            ),
        ),
        "phi3": Architecture(("Phi3ForCausalLM",), llama_reader(RotaryDecoder(epsilon=1e-5))),
        "granite": Architecture(("GraniteForCausalLM",), llama_reader(has_multipliers=True)),
        "qwen3": Architecture(
            ("Qwen3ForCausalLM",),
            llama_reader(
                RotaryDecoder(
                    key_value_heads=32,
                    head_size=128,
                    window=4096,
                    window_needs_use=True,
                    window_from=28,
                    norm_over="head",
                )
            ),
        ),
        "olmo2": Architecture(
            ("Olmo2ForCausalLM",), llama_reader(RotaryDecoder(norm_over="width", epsilon=1e-5), block_norms="after")
        ),
        "olmo3": Architecture(
            ("Olmo3ForCausalLM",),
            llama_reader(
                RotaryDecoder(
                    window=4096,
                    full_attention_every=4,
                    norm_over="width",
                    base=5e5,
                    window_base=5e5,
                    epsilon=1e-5,
                ),
                block_norms="after",
            ),
        ),
        "gemma": Architecture(
            ("GemmaForCausalLM",),
            gemma_reader(
                RotaryDecoder(head_size=256, has_geglu=True, is_tied=True),
                block_norms=None,
                logits_soft_cap=None,
                score_soft_cap=None,
            ),
        ),
        "gemma2": Architecture(
            ("Gemma2ForCausalLM",),
            gemma_reader(
                RotaryDecoder(4, 256, 4096, full_attention_every=2, has_geglu=True, is_tied=True),
                block_norms="both",
                logits_soft_cap=30.0,
                score_soft_cap=50.0,
            ),
        ),
        "gemma3_text": Architecture(
            ("Gemma3ForCausalLM",),
            gemma_reader(
                RotaryDecoder(
                    key_value_heads=4,
                    head_size=256,
                    window=4096,
                    full_attention_every=6,
                    norm_over="head",
                    has_geglu=True,
                    is_tied=True,
                    base=1e6,
                    window_base=1e4,
                ),
                block_norms="both",
                logits_soft_cap=None,
                score_soft_cap=None,
            ),
        ),
        "mixtral": Architecture(
            ("MixtralForCausalLM",),
            moe_reader(
                RotaryDecoder(key_value_heads=8, base=1e6, epsilon=1e-5),
                experts=8,
                experts_per_token=2,
                width="intermediate_size",
            ),
        ),
        "qwen3_moe": Architecture(
            ("Qwen3MoeForCausalLM",),
            moe_reader(
                RotaryDecoder(key_value_heads=4, window=4096, window_needs_use=True, norm_over="head"),
                experts=128,
                experts_per_token=8,
                width="moe_intermediate_size",
            ),
        ),
        "bert": Architecture(("BertForPreTraining", "BertForMaskedLM"), _bert(*_BERT_DROPOUTS, types=2)),
        "roberta": Architecture(("RobertaForMaskedLM",), _bert(*_BERT_DROPOUTS, types=2, positions_before=2)),
        "distilbert": Architecture(("DistilBertForMaskedLM",), _bert("dropout", "attention_dropout", types=0)),
        "t5": Architecture(("T5ForConditionalGeneration",), _t5),
        "vit": Architecture(("ViTForImageClassification",), _vit),
        "swin": Architecture(("SwinForImageClassification",), _swin),
    }
)
"""Readers by model type: a family has the parameters of transformers' class, or a remark says by how many it differs."""

WITHOUT_FAMILY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gpt_oss": "experts and attention's outputs have biases, and every head has a sink, a score of no key",
        "deepseek_v2": "it has latent attention (kv_lora_rank), shared experts and first dense layers (first_k_dense_replace)",
        "deepseek_v3": "it has latent attention (kv_lora_rank), shared experts and first dense layers (first_k_dense_replace)",
        "llama4_text": "it has shared experts, and attention by chunks of 8,192 tokens",
    }
)
"""Known model types, and what of them no family has."""
