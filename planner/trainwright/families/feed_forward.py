"""Feed-forward parts: two products with an activation between them, and the gated kind with three."""

from __future__ import annotations

from trainwright.families.operators import dropout, element_wise, layer_norm, matmul, reduced, residual
from trainwright.layer import Operator, Segment, Split


def feed_forward_segment(positions: int, hidden: int, inner: int, *, drops: bool = False) -> Segment:
    """GPT-2's: normalisation, two products with GELU between them, and the residual."""
    return reduced(
        layer_norm("feed_forward_normalisation", positions, hidden),
        *feed_forward_branch(positions, hidden, inner),
        *((dropout("feed_forward_dropout", positions, hidden),) if drops else ()),
        residual("feed_forward_residual", positions, hidden, bias=True),
        elements=positions * hidden,
    )


def feed_forward_branch(positions: int, hidden: int, inner: int) -> tuple[Operator, ...]:
    """Two products with GELU, which keeps its input, between them; the second's bias is the residual's."""
    return (
        matmul("feed_forward_in", positions, hidden, inner, split=Split.COLUMN),
        element_wise("activation", positions, inner, keeps=1, split=Split.WHOLE),
        matmul("feed_forward_out", positions, inner, hidden, bias=False, split=Split.ROW),
    )


def relu_branch(positions: int, hidden: int, inner: int, *, drops: bool = False) -> tuple[Operator, ...]:
    """Two products without bias; ReLU keeps its output alone, which is the second product's input."""
    return (
        matmul("feed_forward_in", positions, hidden, inner, bias=False, split=Split.COLUMN),
        element_wise("activation", positions, inner, split=Split.WHOLE),
        *((dropout("activation_dropout", positions, inner, copies=True, split=Split.WHOLE),) if drops else ()),
        matmul("feed_forward_out", positions, inner, hidden, bias=False, split=Split.ROW),
    )


def gated_branch(positions: int, hidden: int, inner: int) -> tuple[Operator, ...]:
    """SwiGLU without bias: SiLU keeps the gate, the product with it both factors."""
    return (
        matmul("gate_and_up", positions, hidden, 2 * inner, bias=False, split=Split.COLUMN),
        element_wise("gate", positions, inner, inputs=2, keeps=3, split=Split.WHOLE),
        matmul("down", positions, inner, hidden, bias=False, split=Split.ROW),
    )
