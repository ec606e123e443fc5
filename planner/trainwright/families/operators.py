"""Operators that families share: products, convolutions, normalisations and look-ups.

Products count 2 FLOPs per multiply-add; normalisations, look-ups and element-wise operators count none, since memory
bounds them. A tensor that two operators save counts at the one that reads it, so that a layer counts its own input, not
its output.
"""

from __future__ import annotations

from typing import Final

from trainwright.layer import Operator, OperatorKind, Segment, Split

FLOAT32_BYTES = 4
INDEX_BYTES = 8
"""Bytes of a token, target or position index (int64)."""

POSITION_BIASES: Final = "position_biases"

STATISTIC_BYTES = 4
"""Bytes of a mean, an inverse deviation or a sum of exponentials, which are float32 in every number format."""


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
    """Return a product of activations [positions, inner] with a weight [inner, outer]; `keeps`: it saves its input."""
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


def convolution(  # noqa: PLR0913 - the shape of a convolution
    name: str,
    positions: int,
    channels: int,
    filters: int,
    kernel: int,
    *,
    input_positions: int,
    bias: bool = False,
) -> Operator:
    """Return `filters` of kernel × kernel × channels, from `input_positions` pixels to `positions`; it saves its input."""
    weights = kernel * kernel * channels * filters
    return Operator(
        name=name,
        kind=OperatorKind.CONVOLUTION,
        forward_flops_per_row=2.0 * positions * weights,
        input_elements_per_row=input_positions * channels,
        output_elements_per_row=positions * filters,
        positions_per_row=positions,
        weight_elements=weights + (filters if bias else 0),
        saved_elements_per_row=input_positions * channels,
    )


def _normalisation(name: str, positions: int, width: int, parameters: int, statistics: int) -> Operator:
    return Operator(
        name=name,
        kind=OperatorKind.NORMALISATION,
        forward_flops_per_row=0.0,
        input_elements_per_row=positions * width,
        output_elements_per_row=positions * width,
        positions_per_row=positions,
        weight_elements=parameters,
        saved_elements_per_row=positions * width,
        saved_bytes_per_row=STATISTIC_BYTES * statistics,
    )


def layer_norm(name: str, positions: int, width: int) -> Operator:
    """Return a norm with weight and bias; it saves its input, and the mean and inverse deviation of each position."""
    return _normalisation(name, positions, width, 2 * width, 2 * positions)


def rms_norm(name: str, positions: int, width: int) -> Operator:
    """Return a norm with weight only; it saves its input and one statistic per position, as the fused kernel does."""
    return _normalisation(name, positions, width, width, positions)


def batch_norm(name: str, positions: int, channels: int) -> Operator:
    """Return a norm with weight and bias; it saves its input (its statistics are per channel, not per row)."""
    return _normalisation(name, positions, channels, 2 * channels, 0)


def element_wise(  # noqa: PLR0913 - what it reads, writes and keeps
    name: str,
    positions: int,
    width: int,
    *,
    inputs: int = 1,
    weight_elements: int = 0,
    keeps: int = 0,
    split: Split = Split.NONE,
) -> Operator:
    """Return an operator that reads `inputs` tensors of [positions, width], writes one and saves `keeps` of them."""
    return Operator(
        name=name,
        kind=OperatorKind.ELEMENT_WISE,
        forward_flops_per_row=0.0,
        input_elements_per_row=inputs * positions * width,
        output_elements_per_row=positions * width,
        positions_per_row=positions,
        weight_elements=weight_elements,
        saved_elements_per_row=keeps * positions * width,
        split=split,
    )


def residual(name: str, positions: int, width: int, *, bias: bool) -> Operator:
    """Return the sum of a branch and its shortcut, with the unsplit bias of the branch's last product."""
    return element_wise(name, positions, width, inputs=2, weight_elements=width if bias else 0)


def dropout(name: str, positions: int, width: int, *, copies: bool = False, split: Split = Split.NONE) -> Operator:
    """Return a dropout, which saves a mask of one byte per element.

    With `copies` it saves its output, too: the operator before saves the same tensor without dropout.
    """
    return Operator(
        name=name,
        kind=OperatorKind.ELEMENT_WISE,
        forward_flops_per_row=0.0,
        input_elements_per_row=positions * width,
        output_elements_per_row=positions * width,
        positions_per_row=positions,
        saved_elements_per_row=positions * width if copies else 0,
        saved_bytes_per_row=positions * width,
        split=split,
    )


def lookup(name: str, positions: int, width: int, entries: int, *, indexed: bool = True) -> Operator:
    """Return a look-up in a table [entries, width]; it saves the indices unless they are the positions themselves."""
    return Operator(
        name=name,
        kind=OperatorKind.EMBEDDING,
        forward_flops_per_row=0.0,
        input_elements_per_row=positions * width,
        output_elements_per_row=positions * width,
        positions_per_row=positions,
        weight_elements=entries * width,
        saved_bytes_per_row=INDEX_BYTES * positions if indexed else 0,
    )


def position_biases(parameters: int, *, split: Split) -> Operator:
    """Return a table of score biases by relative position.

    It is looked up once per micro-batch, regardless of its rows, so only the table itself counts; attention counts the
    biases by score.
    """
    return Operator(
        name=POSITION_BIASES,
        kind=OperatorKind.EMBEDDING,
        forward_flops_per_row=0.0,
        input_elements_per_row=0,
        output_elements_per_row=0,
        weight_elements=parameters,
        split=split,
    )


def cross_entropy(positions: int, classes: int, *, name: str = "cross_entropy") -> Operator:
    """Return the loss over [positions, classes]; it saves the log-probabilities, in float32, and the targets."""
    return Operator(
        name=name,
        kind=OperatorKind.CROSS_ENTROPY,
        forward_flops_per_row=0.0,
        input_elements_per_row=positions * classes,
        output_elements_per_row=1,
        positions_per_row=positions,
        saved_bytes_per_row=(FLOAT32_BYTES * classes + INDEX_BYTES) * positions,
    )


def all_reduced_segment(*operators: Operator, elements: int, backward_elements: int | None = None) -> Segment:
    """Return a segment at whose ends a tensor group reduces `elements` per row (backward: `backward_elements`)."""
    return Segment(operators, elements, elements if backward_elements is None else backward_elements)
