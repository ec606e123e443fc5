"""What stands before and behind a family's blocks: embeddings, patches, projections and losses."""

from __future__ import annotations

from typing import Final

from trainwright.families.operators import convolution, cross_entropy, dropout, lookup, matmul
from trainwright.layer import LayerKind, Operator, Segment

EMBEDDING: Final = "embedding"
BLOCK: Final = "block"
HEAD: Final = "head"
TOKEN_EMBEDDING: Final = "token_embedding"  # noqa: S105 - a weight's name


def layer(name: str, *operators: Operator, boundary: int, token_embedding: int = 0) -> LayerKind:
    """A layer of one segment that no tensor degree divides.

    Args:
        name: of the kind.
        operators: in order.
        boundary: elements that leave it, per row.
        token_embedding: parameters of the token embedding where other layers hold it too, else 0.
    """
    return LayerKind(
        name=name,
        segments=(Segment(operators),),
        output_elements_per_row=boundary,
        shared_weight=TOKEN_EMBEDDING if token_embedding else None,
        shared_parameters=token_embedding,
    )


def token_embedding_layer(  # noqa: PLR0913 - the shape of an embedding
    tokens: int, hidden: int, vocabulary: int, *, learned_positions: int = 0, tied: bool, drops: bool = False
) -> LayerKind:
    """Token embedding, and learned positions where there are any."""
    parts = [lookup("tokens", tokens, hidden, vocabulary)]
    if learned_positions:
        parts.append(lookup("positions", tokens, hidden, learned_positions, indexed=False))
    if drops:
        parts.append(dropout("embedding_dropout", tokens, hidden))
    return layer(EMBEDDING, *parts, boundary=tokens * hidden, token_embedding=vocabulary * hidden if tied else 0)


def token_head_layer(normalisation: Operator, tokens: int, hidden: int, vocabulary: int, *, tied: bool) -> LayerKind:
    """Final normalisation, projection onto the vocabulary and the loss."""
    return layer(
        HEAD,
        normalisation,
        matmul("projection", tokens, hidden, vocabulary, bias=False),
        cross_entropy(tokens, vocabulary),
        boundary=1,
        token_embedding=vocabulary * hidden if tied else 0,
    )


def patches(image: int, patch: int, channels: int, hidden: int) -> Operator:
    """Patch embedding: a convolution with patch × patch kernels side by side; keeps the image."""
    side = image // patch
    return convolution("patches", side * side, channels, hidden, patch, input_positions=image * image, bias=True)


def classifier(hidden: int, classes: int) -> tuple[Operator, ...]:
    """A projection of one position of each row onto the classes, and the loss."""
    return matmul("projection", 1, hidden, classes), cross_entropy(1, classes)
