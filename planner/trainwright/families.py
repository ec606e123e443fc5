"""Families as models: parameters, FLOPs and boundary sizes of every layer kind, from a few numbers."""

from __future__ import annotations

from trainwright.model import Dtype, Family, Gpt, LayerKind, Model, Segment

EMBEDDING, BLOCK, HEAD = "embedding", "block", "head"


def build(family: Family, dtype: Dtype = Dtype.FLOAT32) -> Model:
    """The model of a family: `[embedding, block × layers, head]` for GPT."""
    return _gpt(family, dtype)


def _gpt(gpt: Gpt, dtype: Dtype) -> Model:
    """GPT-2 (tied embeddings; the head is the final normalisation and the product with the token embedding).

    Matrix products count 2 FLOPs per multiply-add; normalisation and element-wise work is left out, as usual.
    """
    hidden, sequence, vocabulary = gpt.hidden_size, gpt.sequence_length, gpt.vocabulary_size
    boundary = sequence * hidden
    attention_split = 3 * hidden * hidden + 3 * hidden + hidden * hidden  # q, k, v with biases; output without
    feed_forward_split = 4 * hidden * hidden + 4 * hidden + 4 * hidden * hidden
    replicated = 4 * hidden + 2 * hidden  # two normalisations; the biases added after the all-reduces
    token_embedding = vocabulary * hidden
    attention_flops = 2.0 * sequence * 4 * hidden * hidden + 4.0 * sequence * sequence * hidden
    embedding = LayerKind(
        name=EMBEDDING,
        parameters=token_embedding + sequence * hidden,
        split_parameters=0,
        segments=(Segment(forward_flops_per_row=2.0 * boundary, ends_in_all_reduce=False),),
        output_elements_per_row=boundary,
        shared_weight="token_embedding",
        shared_parameters=token_embedding,
    )
    block = LayerKind(
        name=BLOCK,
        parameters=attention_split + feed_forward_split + replicated,
        split_parameters=attention_split + feed_forward_split,
        segments=(
            Segment(forward_flops_per_row=attention_flops, ends_in_all_reduce=True),
            Segment(forward_flops_per_row=2.0 * sequence * 8 * hidden * hidden, ends_in_all_reduce=True),
        ),
        output_elements_per_row=boundary,
    )
    head = LayerKind(
        name=HEAD,
        parameters=token_embedding + 2 * hidden,
        split_parameters=0,
        segments=(Segment(forward_flops_per_row=2.0 * sequence * hidden * vocabulary, ends_in_all_reduce=False),),
        output_elements_per_row=1,
        shared_weight="token_embedding",
        shared_parameters=token_embedding,
    )
    return Model(
        family=gpt,
        dtype=dtype,
        kinds=(embedding, block, head),
        layers=(EMBEDDING, *[BLOCK] * gpt.layers, HEAD),
        max_tensor_degree=gpt.heads,
    )
