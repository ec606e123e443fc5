"""Layers of every family whose operators run sharded equal the whole layer, whatever loops their operators shard."""

from __future__ import annotations

import pytest
from operator_layers import check_layer, random_specs
from varied_families import VARIED_FAMILIES

from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.model import Model
from trainwright.worker_api.operator_support import is_run_sharded
from trainwright_worker.layers.operators.sharded_layers import operators_of
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

FAMILIES: dict[str, Family] = {
    "gpt": Gpt(1, 32, 8, 8, 40),
    "opt": Gpt(1, 32, 8, 8, 40, activation="relu", tied_embeddings=False),
    "falcon": Gpt(
        1, 32, 8, 8, 40, rotary_size=4, parallel_residual=True, shared_norm=True, key_value_heads=4, biases=False
    ),
    "neox": Gpt(1, 32, 8, 8, 40, rotary_size=2, parallel_residual=True),
    "wide_resnet": WideResnet(50, 2, base_channels=8, image_size=32, channels=4, classes=8),
    "t5": T5(1, 32, 8, 8, 40, decoder_sequence_length=4, position_buckets=6),
    "t5 1.1": T5(
        1,
        32,
        8,
        8,
        40,
        decoder_sequence_length=12,
        head_size=8,
        intermediate_size=24,
        gated=True,
        tied_embeddings=False,
    ),
    "swin": Swin((2, 1), 16, (4, 8), image_size=32, patch_size=4, window_size=4, classes=8),
    "trans_gan": TransGan((1, 0, 1, 0), 32, 8, bottom_width=2, latent_size=8, window_size=4),
    "llama": Llama(1, 32, 8, 8, 40, intermediate_size=64, key_value_heads=4, tied_embeddings=True),
    "qwen": Llama(
        1, 32, 8, 8, 40, intermediate_size=64, key_value_heads=4, query_key_norm=True, query_key_value_bias=True
    ),
    "olmo": Llama(
        1, 32, 8, 8, 40, intermediate_size=64, query_key_norm_over="width", query_key_norm=True, block_norms="after"
    ),
    "gemma": Llama(
        2,
        32,
        8,
        8,
        40,
        intermediate_size=64,
        activation="gelu",
        attention_window=3,
        full_attention_every=2,
        block_norms="both",
        window_rotary_base=100.0,
        attention_scale=0.7,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        logits_multiplier=0.25,
        logits_soft_cap=3.0,
    ),
    "bert": Bert(1, 32, 8, 8, 40, token_types=3),
    "vit": Vit(1, 32, 8, 12, 4, classes=20),
    "moe": Moe(
        2,
        32,
        8,
        8,
        40,
        experts=4,
        expert_every=2,
        intermediate_size=32,
        key_value_heads=4,
        query_key_norm=True,
        attention_window=5,
    ),
    "switch": Moe(2, 32, 8, 8, 40, experts=8, experts_per_token=1, expert_every=2, intermediate_size=32, gated=False),
}
BLOCKS_ALONE = {"falcon", "neox", "qwen", "olmo"}
"""Models whose embedding and head are those of others."""
LIKE_OTHERS = {"wide_resnet": {"block_1", "first_2", "block_2", "first_3", "block_3"}, "trans_gan": {"grow_2"}}
"""Kinds of layers that differ from others in their sizes alone."""
OF_OTHER_CONSTANTS = {"swin": [2]}
"""Layers that differ from the first of their kind: their windows are shifted."""
SEEDS = 12


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1), (1, 2)], ids=lambda shape: f"{shape[0]}×{shape[1]}")
@pytest.mark.parametrize("name", FAMILIES)
def test_layer_on_a_mesh_equals_the_whole_layer(name: str, shape: tuple[int, int]) -> None:
    model, axes = Model.of(FAMILIES[name]), (0, 1) if name == "wide_resnet" else (0, 1, 2)
    kinds = [kind for kind in dict.fromkeys(model.layers) if kind not in LIKE_OTHERS.get(name, ())]
    if name in BLOCKS_ALONE:
        kinds = ["block"]
    for layer in [*map(model.layers.index, kinds), *OF_OTHER_CONSTANTS.get(name, ())]:
        for seed in range(SEEDS):
            check_layer(model, random_specs(model, layer, shape, seed), shape, seed, axes=axes)


@pytest.mark.parametrize("family", [*FAMILIES.values(), *VARIED_FAMILIES], ids=repr)
def test_worker_has_every_operator_that_is_not_refused(family: Family) -> None:
    model = Model.of(family)
    layers = make_family_layers(model)
    for layer, name in enumerate(model.layers):
        whole = layers.make(layer, seed=0, shard=TensorShard(), shared={})
        assert {each.name for each in model.kind(name).operators if is_run_sharded(each.name)} <= set(
            operators_of(whole)
        )
