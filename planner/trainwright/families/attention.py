"""Attention, operator by operator: whole or in windows, with grouped keys and values, fused or stored."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.families.operators import STATISTIC_BYTES, dropout, element_wise, layer_norm, matmul, reduced, residual
from trainwright.layer import Attention, Operator, OperatorKind, Segment, Split


@dataclass(frozen=True, slots=True)
class Heads:
    """Which queries of a row meet which keys.

    Attributes:
        queries, keys: positions of each in a row.
        span: keys that one query meets: all of them, or those of its window. A causal mask divides nothing: what it
            hides is computed as well, and counted.
        width: heads × the size of a head.
        key_width: the same of keys and values, smaller where several queries' heads share one.
    """

    queries: int
    keys: int
    span: int
    heads: int
    width: int
    key_width: int

    @classmethod
    def of_itself(cls, positions: int, width: int, heads: int, *, span: int | None = None) -> Heads:
        """Self-attention in which every head has its own keys and values."""
        return cls(positions, positions, span or positions, heads, width, width)

    def operators(self, attention: Attention, *, drops: bool = False) -> tuple[Operator, ...]:
        """From queries, keys and values to their mixture; all of it is divided by a tensor degree.

        The scale, the mask and a bias of the scores are part of the softmax. A bias's table is looked up once for
        each micro-batch, whatever its rows, and is left out. Dropout of the softmax keeps nothing where attention is
        fused: the kernel draws the same numbers again.
        """
        return (self._fused(),) if attention is Attention.FUSED else self._stored(drops=drops)

    @property
    def _flops(self) -> float:
        return 4.0 * self.queries * self.span * self.width

    def _fused(self) -> Operator:
        read = self.queries * self.width + 2 * self.keys * self.key_width
        return Operator(
            name="attention",
            kind=OperatorKind.ATTENTION,
            forward_flops_per_row=self._flops,
            input_elements_per_row=read,
            output_elements_per_row=self.queries * self.width,
            positions_per_row=self.queries,
            saved_elements_per_row=read,
            saved_bytes_per_row=STATISTIC_BYTES * self.heads * self.queries,  # sums of exponentials
            split=Split.WHOLE,
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
        # The products are by the head: shared keys and values are written out for each of them first.
        return element_wise("repeat", 2 * self.keys, self.width, split=Split.WHOLE), *products

    def _product(self, name: str, read: int, written: int, kept: int) -> Operator:
        return Operator(
            name=name,
            kind=OperatorKind.BATCHED_MATMUL,
            forward_flops_per_row=self._flops / 2,
            input_elements_per_row=read,
            output_elements_per_row=written,
            positions_per_row=self.queries,
            saved_elements_per_row=kept,
            split=Split.WHOLE,
        )


def attention_segment(positions: int, hidden: int, heads: int, attention: Attention, *, drops: bool = False) -> Segment:
    """GPT-2's: normalisation, self-attention and the residual; under tensor parallelism heads are divided."""
    return reduced(
        layer_norm("attention_normalisation", positions, hidden),
        *attention_branch(Heads.of_itself(positions, hidden, heads), attention, drops=drops),
        *((dropout("attention_dropout", positions, hidden),) if drops else ()),
        residual("attention_residual", positions, hidden, bias=True),
        elements=positions * hidden,
    )


def attention_branch(
    heads: Heads, attention: Attention, *, bias: bool = True, drops: bool = False
) -> tuple[Operator, ...]:
    """Self-attention from the normalised positions to its output, whose bias is the residual's."""
    return (
        matmul(
            "query_key_value",
            heads.queries,
            heads.width,
            heads.width + 2 * heads.key_width,
            bias=bias,
            split=Split.COLUMN,
        ),
        *heads.operators(attention, drops=drops),
        matmul("attention_output", heads.queries, heads.width, heads.width, bias=False, split=Split.ROW),
    )
