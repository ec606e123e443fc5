"""Building blocks of families: attention, feed-forward, embeddings, patches, projections and losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.families.operators import (
    FLOAT32_BYTES,
    INDEX_BYTES,
    STATISTIC_BYTES,
    all_reduced_segment,
    convolution,
    cross_entropy,
    dropout,
    element_wise,
    layer_norm,
    lookup,
    matmul,
    residual,
)
from trainwright.layer import Attention, LayerKind, LayerList, Operator, OperatorKind, Segment, Split, Traffic


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Numbers of queries and keys per row, and their widths.

    Attributes:
        queries, keys: positions of each in a row.
        span: keys per query: all of them, or those of its window. Scores that a causal mask hides are counted.
        width: heads × the size of a head.
        key_width: width of the keys, and of the values; smaller where several query heads share one.
        is_causal: whether a mask hides later positions.
        window: positions that a causal mask shows to a query, itself included; None: all before it.
    """

    queries: int
    keys: int
    span: int
    heads: int
    width: int
    key_width: int
    is_causal: bool = False
    window: int | None = None

    @classmethod
    def of_itself(
        cls, positions: int, width: int, heads: int, *, span: int | None = None, is_causal: bool = False
    ) -> AttentionShape:
        """Return self-attention in which every head has its own keys and values."""
        return cls(positions, positions, span or positions, heads, width, width, is_causal)

    def operators(
        self, attention: Attention, *, drops: bool = False, biases: float = 0.0, prefix: str = ""
    ) -> tuple[Operator, ...]:
        """Return the operators from queries, keys and values to the context, all split by a tensor degree.

        Scale, mask and bias of the scores are part of the softmax. Dropout of the softmax saves nothing in fused
        attention: the kernel draws the same numbers again.

        Args:
            attention: implementation. Only the fused one skips what a window hides; others compute and store all scores.
            drops: whether the softmax has dropout.
            biases: learned biases of scores, equal for all rows. Fused attention saves them once per micro-batch, others
                do not. Not counted: their gradient for each row, which the backward of one block at a time holds.
            prefix: of the operators' names, where a layer has two attentions.
        """
        made = (self._fused(biases),) if attention is Attention.FUSED else self._stored(drops=drops)
        if attention is Attention.MATH:
            made = tuple(map(_saved_in_float32, made))
        return tuple(replace(operator, name=prefix + operator.name) for operator in made) if prefix else made

    @property
    def _pairs(self) -> int:
        """Pairs of a query and a key that fused attention counts, twice those that a causal mask shows.

        T² without a window; with one of W positions the shown pairs are T·W − W²/2, but for a half of the diagonal in both.
        """
        if self.window is None:
            return self.queries * self.span
        return self.window * (2 * self.queries - self.window)

    def _fused(self, biases: float) -> Operator:
        read = self.queries * self.width + 2 * self.keys * self.key_width
        return Operator(
            name="attention",
            kind=OperatorKind.ATTENTION,
            forward_flops_per_row=4.0 * self._pairs * self.width,
            input_elements_per_row=read,
            output_elements_per_row=self.queries * self.width,
            positions_per_row=self.queries,
            saved_elements_per_row=read,
            saved_bytes_per_row=STATISTIC_BYTES * self.heads * self.queries,  # sums of exponentials
            split=Split.WHOLE,
            saved_elements_per_micro_batch=biases,
            is_causal=self.is_causal,
        )

    def _stored(self, *, drops: bool) -> tuple[Operator, ...]:
        scores = self.heads * self.queries * self.span
        queries, keys = self.queries * self.width, self.keys * self.width
        softmax = Operator(
            name="softmax",
            kind=OperatorKind.SOFTMAX,
            forward_flops_per_row=0.0,
            input_elements_per_row=scores,
            output_elements_per_row=scores,
            positions_per_row=self.queries,
            saved_elements_per_row=scores,
            split=Split.WHOLE,
            is_causal=self.is_causal,
        )
        left = dropout("softmax_dropout", self.queries, self.heads * self.span, copies=True, split=Split.WHOLE)
        products = (
            self._product("scores", queries + keys, scores, kept=queries + keys),
            softmax,
            *((left,) if drops else ()),
            self._product("context", scores + keys, queries, kept=keys),
        )
        if self.key_width == self.width:
            return products
        # Products are per head, so shared keys and values are first expanded for each of them.
        return element_wise("repeat", 2 * self.keys, self.width, split=Split.WHOLE), *products

    def _product(self, name: str, read: int, written: int, kept: int) -> Operator:
        return Operator(
            name=name,
            kind=OperatorKind.BATCHED_MATMUL,
            forward_flops_per_row=2.0 * self.queries * self.span * self.width,
            input_elements_per_row=read,
            output_elements_per_row=written,
            positions_per_row=self.queries,
            saved_elements_per_row=kept,
            split=Split.WHOLE,
        )


def _saved_in_float32(operator: Operator) -> Operator:
    saved = operator.saved_elements_per_row * FLOAT32_BYTES + operator.saved_bytes_per_row
    return replace(operator, saved_elements_per_row=0.0, saved_bytes_per_row=saved)


def attention_segment(positions: int, hidden: int, heads: int, attention: Attention) -> Segment:
    """Return ViT's normalisation, self-attention and residual; a tensor degree splits the heads."""
    return all_reduced_segment(
        layer_norm("attention_normalisation", positions, hidden),
        *attention_branch(AttentionShape.of_itself(positions, hidden, heads), attention),
        residual("attention_residual", positions, hidden, bias=True),
        elements=positions * hidden,
    )


def attention_branch(  # noqa: PLR0913 - the shape of a branch
    heads: AttentionShape,
    attention: Attention,
    *,
    hidden: int | None = None,
    bias: bool = True,
    drops: bool = False,
    score_biases: float = 0.0,
) -> tuple[Operator, ...]:
    """Return self-attention from the normalised positions to its output, whose bias belongs to the residual.

    `hidden`: width of both; by default that of all heads together.
    """
    hidden = hidden or heads.width
    return (
        matmul(
            "query_key_value",
            heads.queries,
            hidden,
            heads.width + 2 * heads.key_width,
            bias=bias,
            split=Split.COLUMN,
        ),
        *heads.operators(attention, drops=drops, biases=score_biases),
        matmul("attention_output", heads.queries, heads.width, hidden, bias=False, split=Split.ROW),
    )


EMBEDDING: Final = "embedding"
BLOCK: Final = "block"
HEAD: Final = "head"
TOKEN_EMBEDDING: Final = "token_embedding"  # noqa: S105 - a weight's name


def layer(name: str, *operators: Operator, boundary: int, token_embedding: int = 0) -> LayerKind:
    """Return a layer of one segment that no tensor degree splits.

    Args:
        name: of the kind.
        operators: in order.
        boundary: output elements per row.
        token_embedding: parameters of the token embedding if other layers share it, else 0.
    """
    return LayerKind(
        name=name,
        segments=(Segment(operators),),
        output_elements_per_row=boundary,
        shared_weight=TOKEN_EMBEDDING if token_embedding else None,
        shared_parameters=token_embedding,
    )


def token_embedding_layer(  # noqa: PLR0913 - the shape of an embedding
    tokens: int,
    hidden: int,
    vocabulary: int,
    *,
    learned_positions: int = 0,
    tied: bool,
    drops: bool = False,
    is_scaled: bool = False,
) -> LayerKind:
    """Return the token embedding, times a constant if it is scaled, with learned positions if there are any."""
    parts = [lookup("tokens", tokens, hidden, vocabulary)]
    if is_scaled:
        parts.append(element_wise("embedding_scale", tokens, hidden))
    if learned_positions:
        parts.append(lookup("positions", tokens, hidden, learned_positions, indexed=False))
    if drops:
        parts.append(dropout("embedding_dropout", tokens, hidden))
    return layer(EMBEDDING, *parts, boundary=tokens * hidden, token_embedding=vocabulary * hidden if tied else 0)


def token_head_layer(  # noqa: PLR0913 - the shape of a head
    normalisation: Operator,
    tokens: int,
    hidden: int,
    vocabulary: int,
    *,
    tied: bool,
    is_scaled: bool = False,
    is_capped: bool = False,
) -> LayerKind:
    """Return the final normalisation, the projection onto the vocabulary, the logits' scale and soft cap if there are any, and the loss.

    The scale is that of what the projection reads, which is smaller.
    """
    return layer(
        HEAD,
        normalisation,
        *((element_wise("scale", tokens, hidden),) if is_scaled else ()),
        matmul("projection", tokens, hidden, vocabulary, bias=False),
        *((_soft_cap(tokens, vocabulary),) if is_capped else ()),
        cross_entropy(tokens, vocabulary),
        boundary=1,
        token_embedding=vocabulary * hidden if tied else 0,
    )


def _soft_cap(positions: int, classes: int) -> Operator:
    """Return c × tanh(logits / c): three kernels that read and write the logits, of which tanh saves its output."""
    cap = element_wise("soft_cap", positions, classes, keeps=1)
    return replace(cap, traffic=Traffic(6.0 * positions * classes, 0.0, 7.0 * positions * classes, 0.0))


_TOKEN_LOOKUPS = {"tokens", "decoder_tokens"}
_STATISTICS = 3
"""Statistics of a position that ranks gather for the loss: maximum, sum of exponentials, the target's logit."""


def divide_vocabulary(layer_list: LayerList, vocabulary: int) -> LayerList:
    """Return the layers with the divided form of each kind that has a token embedding or a projection onto the vocabulary.

    The form is Megatron-LM's: each rank of a tensor group has the embeddings, or the logits, of its slice of the vocabulary.
    The ranks sum what they looked up, and the gradients of the projection's input; for the loss they gather statistics of
    their logits. Each rank has at least one entry, so a tiny vocabulary limits the tensor degree.
    """
    largest = layer_list.max_tensor_degree
    possible = (degree for degree in range(min(largest, vocabulary), 0, -1) if largest % degree == 0)
    forms = (_divided_form(kind) for kind in layer_list.kinds)
    divided = tuple(form for form in forms if form is not None)
    return replace(layer_list, max_tensor_degree=next(possible), divided=divided)


def _divided_form(kind: LayerKind) -> LayerKind | None:
    operators = kind.operators
    for place, operator in enumerate(operators):
        if operator.name in _TOKEN_LOOKUPS:
            divided = replace(operator, split=Split.WEIGHT)
            summed = Segment((*operators[:place], divided), round(operator.output_elements_per_row))
            rest = operators[place + 1 :]
            return replace(kind, segments=(summed, Segment(rest)) if rest else (summed,))
        if operator.name == "projection":
            end = [part.kind for part in operators].index(OperatorKind.CROSS_ENTROPY)
            loss = operators[end]
            targets = INDEX_BYTES * operator.positions_per_row
            segment = Segment(
                (
                    *operators[:place],
                    replace(operator, split=Split.COLUMN, saved_bytes_per_row=targets),
                    *(replace(part, split=Split.WHOLE) for part in operators[place + 1 : end]),
                    replace(loss, split=Split.WHOLE, saved_bytes_per_row=loss.saved_bytes_per_row - targets),
                    *operators[end + 1 :],
                ),
                backward_all_reduce_elements_per_row=round(operator.input_elements_per_row),
                forward_gathered_bytes_per_row=_STATISTICS * FLOAT32_BYTES * operator.positions_per_row,
            )
            return replace(kind, segments=(segment,))
    return None


def patches(image: int, patch: int, channels: int, hidden: int) -> Operator:
    """Return the patch embedding: a convolution with disjoint patch × patch kernels, which saves the image."""
    side = image // patch
    return convolution("patches", side * side, channels, hidden, patch, input_positions=image * image, bias=True)


def classifier(hidden: int, classes: int) -> tuple[Operator, ...]:
    """Return a projection of one position per row onto the classes, and the loss."""
    return matmul("projection", 1, hidden, classes), cross_entropy(1, classes)


def feed_forward_segment(positions: int, hidden: int, inner: int) -> Segment:
    """Return ViT's normalisation, two products with GELU between them, and the residual."""
    return all_reduced_segment(
        layer_norm("feed_forward_normalisation", positions, hidden),
        *feed_forward_branch(positions, hidden, inner),
        residual("feed_forward_residual", positions, hidden, bias=True),
        elements=positions * hidden,
    )


def feed_forward_branch(
    positions: int, hidden: int, inner: int, *, is_rectified: bool = False, bias: bool = True
) -> tuple[Operator, ...]:
    """Return two products with GELU between them, which saves its input; the second's bias belongs to the residual.

    `is_rectified`: a ReLU in place of GELU, which saves its output alone, the second product's input.
    """
    return (
        matmul("feed_forward_in", positions, hidden, inner, bias=bias, split=Split.COLUMN),
        element_wise("activation", positions, inner, keeps=0 if is_rectified else 1, split=Split.WHOLE),
        matmul("feed_forward_out", positions, inner, hidden, bias=False, split=Split.ROW),
    )


def relu_branch(positions: int, hidden: int, inner: int, *, drops: bool = False) -> tuple[Operator, ...]:
    """Return two products without bias; the ReLU between them saves only its output, the second product's input."""
    return (
        matmul("feed_forward_in", positions, hidden, inner, bias=False, split=Split.COLUMN),
        element_wise("activation", positions, inner, split=Split.WHOLE),
        *((dropout("activation_dropout", positions, inner, copies=True, split=Split.WHOLE),) if drops else ()),
        matmul("feed_forward_out", positions, inner, hidden, bias=False, split=Split.ROW),
    )


def gated_branch(positions: int, hidden: int, inner: int, *, drops: bool = False) -> tuple[Operator, ...]:
    """Return SwiGLU or GEGLU without bias: the activation saves the gate, the product with it both factors."""
    return (
        matmul("gate_and_up", positions, hidden, 2 * inner, bias=False, split=Split.COLUMN),
        element_wise("gate", positions, inner, inputs=2, keeps=3, split=Split.WHOLE),
        *((dropout("gate_dropout", positions, inner, split=Split.WHOLE),) if drops else ()),
        matmul("down", positions, inner, hidden, bias=False, split=Split.ROW),
    )
