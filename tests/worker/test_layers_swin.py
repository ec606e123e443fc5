"""Swin's layers: they equal Hugging Face's Swin with the same weights, shifted windows included."""

from __future__ import annotations

import torch
from layer_runs import copy_linear, copy_norm, made, run
from transformers import SwinConfig, SwinForImageClassification

from trainwright.families import Swin
from trainwright.model import Model
from trainwright_worker.layers.image_models import Windows
from trainwright_worker.layers.registry import make_family_layers

# 16, 8 and 4 patches per side: shifted windows in two stages, a single window in the third.
SWIN = Swin((2, 3, 2), 16, (2, 4, 8), image_size=32, patch_size=2, window_size=4, classes=10)
MODEL = Model.of(SWIN)
ROWS = 3


def copy_block(theirs, ours) -> None:
    copy_norm(theirs.layernorm_before, ours.first_norm_weight, ours.first_norm_bias)
    copy_norm(theirs.layernorm_after, ours.second_norm_weight, ours.second_norm_bias)
    attention = theirs.attention
    for part, projection in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
        copy_linear(projection, ours.qkv_weight[part], ours.qkv_bias[part])
    copy_linear(attention.o_proj, ours.attention_weight, ours.attention_bias)
    attention.relative_position_bias.relative_position_bias_table.copy_(ours.position_biases)
    copy_linear(theirs.mlp.fc1, ours.expand_weight, ours.expand_bias)
    copy_linear(theirs.mlp.fc2, ours.contract_weight, ours.contract_bias)


def test_the_loss_and_the_gradients_are_hugging_faces() -> None:
    layers = made(MODEL)
    theirs = SwinForImageClassification(
        SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 3, 2], num_heads=[2, 4, 8], window_size=4,
            num_labels=10, hidden_dropout_prob=0, attention_probs_dropout_prob=0, drop_path_rate=0,
        )
    )  # fmt: skip
    embedding, head = layers[0], layers[-1]
    theirs_in_order, between = [], iter(layers[1:-1])
    with torch.no_grad():
        copy_linear(
            theirs.swin.embeddings.patch_embeddings.projection, embedding.patches.weight, embedding.patches.bias
        )
        copy_norm(theirs.swin.embeddings.norm, embedding.norm_weight, embedding.norm_bias)
        for stage in theirs.swin.encoder.layers:
            for block in stage.blocks:
                ours = next(between)
                copy_block(block, ours)
                theirs_in_order.append((block, ours))
            if stage.downsample is not None:
                ours = next(between)
                copy_norm(stage.downsample.norm, ours.norm_weight, ours.norm_bias)
                copy_linear(stage.downsample.reduction, ours.merge_weight, None)
        copy_norm(theirs.swin.layernorm, head.norm_weight, head.norm_bias)
        copy_linear(theirs.classifier, head.class_weight, head.class_bias)
    rows = make_family_layers(MODEL).rows(("images", "targets"), seed=1, iteration=0, first=0, count=ROWS)
    loss = run(layers, rows) / ROWS
    expected = theirs(pixel_values=rows["images"], labels=rows["targets"]).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for block, ours in theirs_in_order:
        table = block.attention.relative_position_bias.relative_position_bias_table
        torch.testing.assert_close(ours.position_biases.grad, table.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.qkv_weight.grad[2], block.attention.v_proj.weight.grad, rtol=1e-4, atol=1e-6)
    patches = theirs.swin.embeddings.patch_embeddings.projection
    torch.testing.assert_close(embedding.patches.weight.grad, patches.weight.grad, rtol=1e-4, atol=1e-6)


def test_every_second_block_of_a_stage_is_shifted_if_there_is_more_than_one_window() -> None:
    shifts = [layer.windows.shift for layer in made(MODEL) if hasattr(layer, "windows")]
    assert shifts == [0, 2, 0, 2, 0, 0, 0]


def test_smaller_window_uses_the_middle_of_the_table() -> None:
    """A last stage with fewer patches than a window uses the table's entries for its own distances."""
    places = Windows(side=2, window=2).relative_position_index(max_window=7)
    middle = 6 * 13 + 6
    for one, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        for other, (other_row, other_column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            assert places[one, other] == middle + 13 * (row - other_row) + column - other_column


def test_joined_windows_equal_the_image() -> None:
    for shift in (0, 1, 2):
        windows, image = Windows(8, 4, shift), torch.randn(2, 64, 3)
        assert torch.equal(windows.reverse(windows.partition(image)), image)
