"""ViT's layers: they equal Hugging Face's ViT with the same weights."""

from __future__ import annotations

import pytest
import torch
from layer_runs import copy_linear, copy_norm, made, run
from transformers import ViTConfig, ViTForImageClassification

from trainwright.families import Vit
from trainwright.model import Model
from trainwright_worker.layers.registry import make_family_layers

VIT = Vit(2, 32, 4, image_size=32, patch_size=8, classes=10, intermediate_size=48)
MODEL = Model.of(VIT)
ROWS = 3


def test_the_loss_and_the_gradients_are_hugging_faces() -> None:
    layers = made(MODEL)
    theirs = ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32,
            patch_size=8, num_labels=10, hidden_dropout_prob=0, attention_probs_dropout_prob=0, layer_norm_eps=1e-5,
        )
    )  # fmt: skip
    with torch.no_grad():
        embedding, head = layers[0], layers[-1]
        theirs.vit.embeddings.cls_token.copy_(embedding.class_token)
        theirs.vit.embeddings.position_embeddings.copy_(embedding.positions)
        copy_linear(theirs.vit.embeddings.patch_embeddings.projection, embedding.patches.weight, embedding.patches.bias)
        for block, layer in zip(layers[1:-1], theirs.vit.layers, strict=True):
            copy_norm(layer.layernorm_before, block.first_norm_weight, block.first_norm_bias)
            copy_norm(layer.layernorm_after, block.second_norm_weight, block.second_norm_bias)
            attention = layer.attention
            for part, projection in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
                copy_linear(projection, block.qkv_weight[part], block.qkv_bias[part])
            copy_linear(attention.o_proj, block.attention_weight, block.attention_bias)
            copy_linear(layer.mlp.fc1, block.expand_weight, block.expand_bias)
            copy_linear(layer.mlp.fc2, block.contract_weight, block.contract_bias)
        copy_norm(theirs.vit.layernorm, head.norm_weight, head.norm_bias)
        copy_linear(theirs.classifier, head.class_weight, head.class_bias)
    rows = make_family_layers(MODEL).rows(("images", "targets"), seed=1, iteration=0, first=0, count=ROWS)
    loss = run(layers, rows) / ROWS
    expected = theirs(pixel_values=rows["images"], labels=rows["targets"]).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for ours, other in (
        (embedding.patches.weight, theirs.vit.embeddings.patch_embeddings.projection.weight),
        (embedding.class_token, theirs.vit.embeddings.cls_token),
        (embedding.positions, theirs.vit.embeddings.position_embeddings),
        (layers[1].qkv_weight[1:2], theirs.vit.layers[0].attention.k_proj.weight),
        (layers[2].expand_weight, theirs.vit.layers[1].mlp.fc1.weight),
    ):
        gradient = layers[1].qkv_weight.grad[1:2] if ours.grad_fn is not None else ours.grad
        torch.testing.assert_close(gradient.view_as(other), other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("intermediate_size", [None, 48])
def test_feed_forward_is_four_times_as_wide_by_default(intermediate_size: int | None) -> None:
    model = Model.of(Vit(1, 32, 4, image_size=16, patch_size=8, intermediate_size=intermediate_size))
    assert made(model)[1].expand_weight.shape == (intermediate_size or 128, 32)
