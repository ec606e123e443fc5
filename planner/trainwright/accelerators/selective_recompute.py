"""Selective recompute: operators that a layer computes again in its backward, and the bytes that it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainwright.accelerators.efficiency import SELECTIVE_PRODUCTS_RATIO
from trainwright.layer import Dtype, LayerKind, Operator, OperatorKind, Split
from trainwright.runtime import SelectiveRecompute

CORE: Final = {OperatorKind.ATTENTION, OperatorKind.BATCHED_MATMUL, OperatorKind.SOFTMAX}
"""Operators of attention between its projections, besides the dropout of its scores."""


def has_attention(kind: LayerKind) -> bool:
    """Return whether a layer has attention: the others save everything."""
    return any(operator.kind in CORE for operator in kind.operators)


def recomputed_shares(kind: LayerKind, recompute: SelectiveRecompute | None) -> tuple[float, ...]:
    """Return the share of each operator's forward that the backward computes again."""
    if recompute is None or not has_attention(kind):
        return (0.0,) * len(kind.operators)
    if recompute is SelectiveRecompute.ATTENTION:
        return tuple(float(operator.kind in CORE or _drops_scores(operator)) for operator in kind.operators)
    shares = {OperatorKind.MATMUL: SELECTIVE_PRODUCTS_RATIO, **dict.fromkeys(CORE, 0.0)}
    return tuple(shares.get(operator.kind, 1.0) for operator in kind.operators)


def saved_bytes(
    kind: LayerKind, recompute: SelectiveRecompute | None, dtype: Dtype, tensor_degree: int, rows: int
) -> float:
    """Return what one rank saves of a forward of `rows` rows for its backward, including the layer's input."""
    whole = kind.saved_bytes(dtype, tensor_degree, rows)
    if recompute is None or not has_attention(kind):
        return whole
    degree = tensor_degree if kind.is_tensor_parallel else 1
    if recompute is SelectiveRecompute.ATTENTION:
        scores = [
            operator for operator in kind.operators if operator.kind is OperatorKind.SOFTMAX or _drops_scores(operator)
        ]
        return whole - rows * sum(operator.saved_bytes(dtype, degree) for operator in scores)
    products = [operator for operator in kind.operators if operator.kind is OperatorKind.MATMUL]
    kept = kind.operators[0].input_elements_per_row + _outputs(products, degree) / 2
    attention = [
        operator for operator in kind.operators if operator.kind in CORE and operator.kind is not OperatorKind.SOFTMAX
    ]
    return min(rows * dtype.num_bytes * (kept + _outputs(attention[-1:], degree)), whole)


def _outputs(operators: Sequence[Operator], degree: int) -> float:
    """Return the elements that operators write per row on one rank."""
    divided = {Split.COLUMN, Split.WHOLE}
    return sum(
        operator.output_elements_per_row / (degree if operator.split in divided else 1) for operator in operators
    )


def _drops_scores(operator: Operator) -> bool:
    return operator.name.endswith("softmax_dropout")
