"""BERT's layers: they equal Hugging Face's BERT with the same weights, and its data is masked like BERT's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hugging_face import Same, WholeModel, assert_same_training
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from trainwright.families import Bert

ROWS = 3
UNMASKED = -100


def pairs(ours: WholeModel, theirs: BertForPreTraining | BertForMaskedLM) -> Iterator[Same]:
    embedding, *blocks, head = ours.layers
    embeddings = theirs.bert.embeddings
    yield Same(embeddings.word_embeddings.weight, embedding.tokens)
    yield Same(embeddings.position_embeddings.weight, embedding.positions)
    yield Same(embeddings.token_type_embeddings.weight, embedding.types)
    yield Same(embeddings.LayerNorm.weight, embedding.norm_weight)
    yield Same(embeddings.LayerNorm.bias, embedding.norm_bias)
    for block, layer in zip(blocks, theirs.bert.encoder.layer, strict=True):
        attention = layer.attention
        for index, linear in enumerate((attention.self.query, attention.self.key, attention.self.value)):
            yield Same(linear.weight, block.qkv_weight, lambda w, index=index: w[index])
            yield Same(linear.bias, block.qkv_bias, lambda w, index=index: w[index])
        yield Same(attention.output.dense.weight, block.attention_weight)
        yield Same(attention.output.dense.bias, block.attention_bias)
        yield Same(attention.output.LayerNorm.weight, block.attention_norm_weight)
        yield Same(attention.output.LayerNorm.bias, block.attention_norm_bias)
        yield Same(layer.intermediate.dense.weight, block.expand_weight)
        yield Same(layer.intermediate.dense.bias, block.expand_bias)
        yield Same(layer.output.dense.weight, block.contract_weight)
        yield Same(layer.output.dense.bias, block.contract_bias)
        yield Same(layer.output.LayerNorm.weight, block.feed_forward_norm_weight)
        yield Same(layer.output.LayerNorm.bias, block.feed_forward_norm_bias)
    predictions = theirs.cls.predictions
    yield Same(predictions.transform.dense.weight, head.transform_weight)
    yield Same(predictions.transform.dense.bias, head.transform_bias)
    yield Same(predictions.transform.LayerNorm.weight, head.norm_weight)
    yield Same(predictions.transform.LayerNorm.bias, head.norm_bias)
    yield Same(predictions.decoder.bias, head.token_bias)
    if isinstance(theirs, BertForPreTraining):
        yield Same(theirs.bert.pooler.dense.weight, head.pooler_weight)
        yield Same(theirs.bert.pooler.dense.bias, head.pooler_bias)
        yield Same(theirs.cls.seq_relationship.weight, head.follows_weight)
        yield Same(theirs.cls.seq_relationship.bias, head.follows_bias)


@pytest.mark.parametrize("next_sentence", [True, False])
def test_loss_and_gradients_are_hugging_faces(next_sentence: bool) -> None:
    bert = Bert(2, 32, 4, 16, 64, intermediate_size=40, token_types=3, next_sentence=next_sentence)
    ours = WholeModel(bert)
    theirs = (BertForPreTraining if next_sentence else BertForMaskedLM)(
        BertConfig(
            vocab_size=bert.vocabulary_size,
            hidden_size=bert.hidden_size,
            num_hidden_layers=bert.layers,
            num_attention_heads=bert.heads,
            intermediate_size=bert.feed_forward_size,
            max_position_embeddings=bert.sequence_length,
            type_vocab_size=bert.token_types,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            pad_token_id=None,
            attn_implementation="eager",
        )
    )
    same = tuple(pairs(ours, theirs))
    for pair in same:
        pair.copy()
    rows = ours.rows(ROWS)
    (loss,) = ours.losses(rows)
    labels = {"next_sentence_label": rows["next_sentence"]} if next_sentence else {}
    output = theirs(
        input_ids=rows["tokens"], token_type_ids=rows["token_types"], labels=rows["targets"], **labels
    )  # a mean over all masked tokens; rows have equally many
    assert_same_training(loss / ROWS, output.loss, same)


def test_masked_position_has_the_mask_token_and_its_target() -> None:
    rows = WholeModel(Bert(1, 16, 2, 40, 64)).rows(20)
    masked = rows["targets"] != UNMASKED
    assert (masked.sum(1) == 6).all()
    assert (rows["tokens"][masked] == 63).all()
    assert (rows["tokens"][~masked] < 32).all()
    assert (rows["targets"][masked] < 32).all()
    assert (rows["token_types"].sum(1) == 20).all()
    assert 0 < rows["next_sentence"].sum() < 20


def test_following_sentence_continues_the_first() -> None:
    rows = WholeModel(Bert(1, 16, 2, 40, 64)).rows(80)
    text = torch.where(rows["targets"] == UNMASKED, rows["tokens"], rows["targets"])
    goes_on = (text[:, 20] == (text[:, 19] + 7) % 32).float()
    strange = rows["next_sentence"].bool()
    assert goes_on[~strange].mean() > 0.7
    assert goes_on[strange].mean() < 0.3


def test_a_row_without_masked_positions_adds_nothing() -> None:
    model = WholeModel(Bert(1, 16, 2, 8, 64, next_sentence=False))
    rows = model.rows(2)
    none = {**rows, "targets": torch.full_like(rows["targets"], UNMASKED)}
    assert model.losses(none)[0] == 0
