"""Families whose layers every test of single layers tries: each has a part that the others lack."""

from __future__ import annotations

from trainwright.families import T5, Gpt, Llama, Moe

VARIED_FAMILIES = (
    Gpt(1, 32, 4, 12, 50, activation="relu"),
    Gpt(1, 32, 4, 12, 50, rotary_size=4, parallel_residual=True, tied_embeddings=False),
    Gpt(1, 32, 4, 12, 50, rotary_size=8, parallel_residual=True, shared_norm=True, key_value_heads=2, biases=False),
    Gpt(1, 32, 4, 12, 50, key_value_heads=2, tied_embeddings=False),
    Llama(1, 20, 4, 12, 50, intermediate_size=24, key_value_heads=2, head_size=6, query_key_norm=True),
    Llama(1, 32, 4, 12, 50, intermediate_size=24, key_value_heads=2, query_key_value_bias=True),
    Llama(2, 32, 4, 12, 50, 24, 2, attention_window=5, full_attention_every=2),
    Llama(
        2,
        20,
        4,
        12,
        50,
        24,
        2,
        6,
        query_key_norm=True,
        tied_embeddings=True,
        attention_window=5,
        full_attention_every=2,
        block_norms="both",
        activation="gelu",
        embedding_multiplier=4.5,
        logits_soft_cap=3.0,
        attention_scale=0.3,
        window_rotary_base=100.0,
    ),
    Llama(1, 32, 4, 12, 50, 24, 2, query_key_norm=True, query_key_norm_over="width", block_norms="after"),
    Llama(1, 32, 4, 12, 50, 24, embedding_multiplier=12.0, residual_multiplier=0.22, logits_multiplier=0.25),
    Moe(2, 32, 4, 12, 50, experts=3, expert_every=2, intermediate_size=48, attention_window=5),
    T5(1, 20, 4, 12, 50, decoder_sequence_length=6, intermediate_size=24, head_size=6, gated=True),
    Moe(2, 32, 4, 12, 50, experts=4, expert_every=2, intermediate_size=48, key_value_heads=2),
    Moe(2, 32, 4, 12, 50, experts=6, experts_per_token=1, expert_every=2, intermediate_size=48, gated=False),
)
