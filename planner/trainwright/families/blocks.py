"""Parts that families share: attention, feed-forward, embedding and head, operator by operator.

Matrix products count 2 FLOPs for each multiply-add; normalisation and element-wise work counts none, memory limits it.
"""

from __future__ import annotations

from typing import Final

from trainwright.layer import Attention, LayerKind, Operator, OperatorKind, Segment, Split

EMBEDDING: Final = "embedding"
BLOCK: Final = "block"
HEAD: Final = "head"
TOKEN_EMBEDDING: Final = "token_embedding"  # noqa: S105 - a weight's name


def check_positive(family: object, *names: str) -> None:
    """Raises ValueError naming the first of these fields that is below 1."""
    for name in names:
        if getattr(family, name) < 1:
            kind = getattr(family, "family", type(family).__name__)
            raise ValueError(f"{kind}.{name} must be at least 1, got {getattr(family, name)}")


def matmul(  # noqa: PLR0913 - the shape of a matrix product
    name: str,
    positions: int,
    inner: int,
    outer: int,
    *,
    bias: bool = True,
    split: Split = Split.NONE,
    keeps: bool = True,
) -> Operator:
    """A product of activations [positions, inner] with a weight [inner, outer]; keeps its input unless told otherwise."""
    return Operator(
        name=name,
        kind=OperatorKind.MATMUL,
        forward_flops_per_row=2.0 * positions * inner * outer,
        input_elements_per_row=positions * inner,
        output_elements_per_row=positions * outer,
        positions_per_row=positions,
        weight_elements=inner * outer + (outer if bias else 0),
        saved_elements_per_row=positions * inner if keeps else 0,
        split=split,
    )


def normalisation(name: str, positions: int, width: int, *, parameters: int | None = None) -> Operator:
    """A layer normalisation (weight and bias): keeps its input, and two float32 statistics for each position."""
    return Operator(
        name=name,
        kind=OperatorKind.NORMALISATION,
        forward_flops_per_row=0.0,
        input_elements_per_row=positions * width,
        output_elements_per_row=positions * width,
        positions_per_row=positions,
        weight_elements=2 * width if parameters is None else parameters,
        saved_elements_per_row=positions * width,
        saved_bytes_per_row=2 * 4 * positions,
    )


def element_wise(  # noqa: PLR0913 - what it reads, writes and keeps
    name: str,
    positions: int,
    width: int,
    *,
    inputs: int = 1,
    weight_elements: int = 0,
    keeps: bool = False,
    split: Split = Split.NONE,
) -> Operator:
    """An operator that reads `inputs` tensors of [positions, width] and writes one."""
    return Operator(
        name=name,
        kind=OperatorKind.ELEMENT_WISE,
        forward_flops_per_row=0.0,
        input_elements_per_row=inputs * positions * width,
        output_elements_per_row=positions * width,
        positions_per_row=positions,
        weight_elements=weight_elements,
        saved_elements_per_row=positions * width if keeps else 0,
        split=split,
    )


def attention_core(tokens: int, hidden: int, heads: int, attention: Attention) -> tuple[Operator, ...]:
    """Scores, softmax and their product with the values; queries, keys and values are kept for the backward."""
    scores = heads * tokens * tokens
    flops = 4.0 * tokens * tokens * hidden
    if attention is Attention.FUSED:
        return (
            Operator(
                name="attention",
                kind=OperatorKind.ATTENTION,
                forward_flops_per_row=flops,
                input_elements_per_row=3 * tokens * hidden,
                output_elements_per_row=tokens * hidden,
                positions_per_row=tokens,
                saved_elements_per_row=3 * tokens * hidden,
                saved_bytes_per_row=4 * heads * tokens,  # log-sum-exp of each row of scores
                split=Split.WHOLE,
            ),
        )
    return (
        Operator(
            name="scores",
            kind=OperatorKind.BATCHED_MATMUL,
            forward_flops_per_row=flops / 2,
            input_elements_per_row=2 * tokens * hidden,
            output_elements_per_row=scores,
            positions_per_row=tokens,
            saved_elements_per_row=2 * tokens * hidden,
            split=Split.WHOLE,
        ),
        Operator(
            name="softmax",
            kind=OperatorKind.SOFTMAX,
            forward_flops_per_row=0.0,
            input_elements_per_row=scores,
            output_elements_per_row=scores,
            positions_per_row=tokens,
            saved_elements_per_row=scores,
            split=Split.WHOLE,
        ),
        Operator(
            name="context",
            kind=OperatorKind.BATCHED_MATMUL,
            forward_flops_per_row=flops / 2,
            input_elements_per_row=scores + tokens * hidden,
            output_elements_per_row=tokens * hidden,
            positions_per_row=tokens,
            saved_elements_per_row=tokens * hidden,
            split=Split.WHOLE,
        ),
    )


def attention_segment(tokens: int, hidden: int, heads: int, attention: Attention) -> Segment:
    """Normalisation, self-attention and the residual; under tensor parallelism heads are divided."""
    return Segment(
        operators=(
            normalisation("attention_normalisation", tokens, hidden),
            matmul("query_key_value", tokens, hidden, 3 * hidden, split=Split.COLUMN),
            *attention_core(tokens, hidden, heads, attention),
            matmul("attention_output", tokens, hidden, hidden, bias=False, split=Split.ROW),
            element_wise("attention_residual", tokens, hidden, inputs=2, weight_elements=hidden),
        ),
        forward_all_reduce_elements_per_row=tokens * hidden,
        backward_all_reduce_elements_per_row=tokens * hidden,
    )


def feed_forward_segment(tokens: int, hidden: int, inner: int) -> Segment:
    """Normalisation, two matrix products with an activation between them, and the residual."""
    return Segment(
        operators=(
            normalisation("feed_forward_normalisation", tokens, hidden),
            matmul("feed_forward_in", tokens, hidden, inner, split=Split.COLUMN),
            element_wise("activation", tokens, inner, keeps=True, split=Split.WHOLE),
            matmul("feed_forward_out", tokens, inner, hidden, bias=False, split=Split.ROW),
            element_wise("feed_forward_residual", tokens, hidden, inputs=2, weight_elements=hidden),
        ),
        forward_all_reduce_elements_per_row=tokens * hidden,
        backward_all_reduce_elements_per_row=tokens * hidden,
    )


def embedding_layer(tokens: int, hidden: int, vocabulary: int, *, learned_positions: int, tied: bool) -> LayerKind:
    """Token embedding and learned positions (0: none)."""
    boundary = tokens * hidden
    lookup = Operator(
        name="lookup",
        kind=OperatorKind.EMBEDDING,
        forward_flops_per_row=2.0 * boundary,
        input_elements_per_row=boundary,
        output_elements_per_row=boundary,
        positions_per_row=tokens,
        weight_elements=(vocabulary + learned_positions) * hidden,
        saved_bytes_per_row=8 * tokens,  # the token indices
    )
    return LayerKind(
        name=EMBEDDING,
        segments=(Segment((lookup,)),),
        output_elements_per_row=boundary,
        shared_weight=TOKEN_EMBEDDING if tied else None,
        shared_parameters=vocabulary * hidden if tied else 0,
    )


def head_layer(tokens: int, hidden: int, vocabulary: int, *, tied: bool) -> LayerKind:
    """Final normalisation, projection onto the vocabulary and cross-entropy."""
    loss = Operator(
        name="cross_entropy",
        kind=OperatorKind.CROSS_ENTROPY,
        forward_flops_per_row=0.0,
        input_elements_per_row=tokens * vocabulary,
        output_elements_per_row=1,
        positions_per_row=tokens,
        saved_elements_per_row=tokens * vocabulary,
    )
    segment = Segment(
        (
            normalisation("final_normalisation", tokens, hidden),
            matmul("projection", tokens, hidden, vocabulary, bias=False),
            loss,
        )
    )
    return LayerKind(
        name=HEAD,
        segments=(segment,),
        output_elements_per_row=1,
        shared_weight=TOKEN_EMBEDDING if tied else None,
        shared_parameters=vocabulary * hidden if tied else 0,
    )
