"""T5's layers: they equal Hugging Face's T5 with the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hugging_face import Same, WholeModel, assert_same_training
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from trainwright.families import T5
from trainwright_worker.layers.transformer_parts import gather_biases, relative_position_buckets

ROWS = 2


def of_attention(theirs: T5Attention, block, prefix: str = "") -> Iterator[Same]:
    if prefix:
        yield Same(theirs.q.weight, block.cross_query_weight)
        yield Same(theirs.k.weight, block.cross_key_value_weight, lambda w: w[0])
        yield Same(theirs.v.weight, block.cross_key_value_weight, lambda w: w[1])
        yield Same(theirs.o.weight, block.cross_attention_weight)
        return
    for index, linear in enumerate((theirs.q, theirs.k, theirs.v)):
        yield Same(linear.weight, block.qkv_weight, lambda w, index=index: w[index])
    yield Same(theirs.o.weight, block.attention_weight)
    if theirs.has_relative_attention_bias:
        yield Same(theirs.relative_attention_bias.weight, block.position_biases)


def pairs(ours: WholeModel, theirs: T5ForConditionalGeneration, t5: T5) -> Iterator[Same]:
    turn, head = ours.layers[t5.layers + 1], ours.layers[-1]
    yield Same(theirs.shared.weight, turn.tokens)
    if not t5.tied_embeddings:
        yield Same(theirs.lm_head.weight, head.tokens)
    yield Same(theirs.encoder.final_layer_norm.weight, turn.norm_weight)
    yield Same(theirs.decoder.final_layer_norm.weight, head.norm_weight)
    encoders, decoders = ours.layers[1 : t5.layers + 1], ours.layers[t5.layers + 2 : -1]
    for block, layer in zip((*encoders, *decoders), (*theirs.encoder.block, *theirs.decoder.block), strict=True):
        attention, *cross, feed_forward = layer.layer
        yield from of_attention(attention.SelfAttention, block)
        yield Same(attention.layer_norm.weight, block.attention_norm_weight)
        for part in cross:
            yield from of_attention(part.EncDecAttention, block, "cross")
            yield Same(part.layer_norm.weight, block.cross_norm_weight)
        yield Same(feed_forward.layer_norm.weight, block.feed_forward_norm_weight)
        if t5.gated:
            yield Same(feed_forward.DenseReluDense.wi_0.weight, block.gate_and_up_weight, lambda w: w[0])
            yield Same(feed_forward.DenseReluDense.wi_1.weight, block.gate_and_up_weight, lambda w: w[1])
        else:
            yield Same(feed_forward.DenseReluDense.wi.weight, block.expand_weight)
        yield Same(feed_forward.DenseReluDense.wo.weight, block.contract_weight)


def reference(t5: T5) -> T5ForConditionalGeneration:
    theirs = T5ForConditionalGeneration(
        T5Config(
            vocab_size=t5.vocabulary_size,
            d_model=t5.hidden_size,
            d_kv=t5.attention_width // t5.heads,
            d_ff=t5.feed_forward_size,
            num_layers=t5.layers,
            num_decoder_layers=t5.decoder_layers,
            num_heads=t5.heads,
            relative_attention_num_buckets=t5.position_buckets,
            feed_forward_proj="gated-gelu" if t5.gated else "relu",
            dropout_rate=0,
            tie_word_embeddings=t5.tied_embeddings,
            attn_implementation="eager",
        )
    )
    if not t5.tied_embeddings:  # their projection is always tied; the flag says whether it is scaled
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    return theirs


@pytest.mark.parametrize(
    "t5",
    [
        T5(2, 32, 4, 12, 64, decoder_sequence_length=7, decoder_layers=2, intermediate_size=48),
        T5(1, 16, 2, 150, 64, decoder_sequence_length=140, position_buckets=16, tied_embeddings=False),
        T5(1, 20, 4, 12, 64, head_size=7, gated=True, tied_embeddings=False),
    ],
    ids=["tied", "long", "gated"],
)
def test_loss_and_gradients_are_hugging_faces(t5: T5) -> None:
    ours, theirs = WholeModel(t5), reference(t5)
    same = tuple(pairs(ours, theirs, t5))
    for pair in same:
        pair.copy()
    rows = ours.rows(ROWS)
    (loss,) = ours.losses(rows)
    output = theirs(input_ids=rows["tokens"], decoder_input_ids=rows["decoder_tokens"], labels=rows["targets"])
    assert_same_training(loss / ROWS, output.loss, same)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("classes", [4, 8, 32])
def test_distance_buckets_equal_hugging_faces(classes: int, both_ways: bool) -> None:
    distances = torch.arange(-199, 300)
    expected = T5Attention._relative_position_bucket(distances, both_ways, classes, 128)
    assert torch.equal(relative_position_buckets(200, 300, classes, bidirectional=both_ways), expected)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("classes", [1, 2, 3, 400])
def test_any_number_of_distance_buckets_is_accepted(classes: int, both_ways: bool) -> None:
    found = relative_position_buckets(200, 300, classes, bidirectional=both_ways)
    assert found.min() >= 0
    assert found.max() < classes


def test_bias_depends_on_the_distance() -> None:
    table = torch.arange(20.0).view(10, 2)
    by_distance = torch.tensor([5, 3, 0, 1, 2, 4])  # distances −2 … 3
    found = gather_biases(table, by_distance, queries=3)
    assert found.shape == (1, 2, 3, 4)
    for query in range(3):
        for key in range(4):
            assert torch.equal(found[0, :, query, key], table[by_distance[key - query + 2]])


def test_decoder_targets_repeat_the_encoder_input() -> None:
    rows = WholeModel(T5(1, 16, 2, 6, 64, decoder_sequence_length=8)).rows(3)
    tokens = rows["tokens"]
    assert torch.equal(rows["targets"], torch.cat((tokens, tokens[:, :2]), 1))
    assert torch.equal(rows["decoder_tokens"][:, 1:], rows["targets"][:, :-1])
    assert (rows["decoder_tokens"][:, 0] == 0).all()
