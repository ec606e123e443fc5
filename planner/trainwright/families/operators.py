"""Operators that families share: products, convolutions, normalisations, look-ups, and the checks of their sizes.

Products count 2 FLOPs for each multiply-add; normalisation, look-ups and element-wise work count none, since memory
limits them. A tensor that two operators keep counts at the one that reads it, so that a layer keeps its own input and
not what it hands on.
"""

from __future__ import annotations

from trainwright.layer import Operator, OperatorKind, Segment, Split

INDEX_BYTES = 8
"""Of a token, a target or a place, as torch holds them (int64)."""

STATISTIC_BYTES = 4
"""Of a mean, an inverse deviation or a sum of exponentials, which are float32 in every number format."""

LARGEST_SIZE = 10**30
"""Beyond any size; up to here no product of sizes overflows."""

MOST_LAYERS = 100_000
"""So many layers of one kind are written down without harm; what is planned has far fewer."""


def check_positive(family: object, *names: str) -> None:
    """Raises ValueError naming the first of these fields (a number, or several) that is not a size."""
    for name in names:
        value = getattr(family, name)
        for size in value if isinstance(value, tuple) else (value,):
            if size is not None and not 1 <= size <= LARGEST_SIZE:
                limit = "at least 1" if size < 1 else f"at most {LARGEST_SIZE:g}"
                raise ValueError(f"{_tag(family)}.{name} must be {limit}, got {_shown(size)}")


def check_layers(family: object, name: str, *, least: int = 1) -> None:
    """Raises ValueError where that number of layers (or one of several) cannot be."""
    value = getattr(family, name)
    for layers in value if isinstance(value, tuple) else (value,):
        if not least <= layers <= MOST_LAYERS:
            raise ValueError(f"{_tag(family)}.{name} must be {least} … {MOST_LAYERS}, got {_shown(layers)}")


def check_multiple(family: object, name: str, of: str, why: str) -> None:
    """Raises ValueError where one field is not a multiple of another."""
    value, divisor = getattr(family, name), getattr(family, of)
    if value % divisor:
        tag = _tag(family)
        raise ValueError(f"{tag}.{name} {value} must be a multiple of {tag}.{of} {divisor}: {why}")


def _tag(family: object) -> str:
    return str(getattr(family, "family", type(family).__name__))


def _shown(number: int) -> str:
    return str(number) if abs(number) <= LARGEST_SIZE else f"a number of {number.bit_length()} bits"


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
    """`filters` of kernel × kernel × channels, from `input_positions` pixels to `positions`; keeps its input."""
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
    """Weight and bias; keeps its input, and the mean and inverse deviation of each position."""
    return _normalisation(name, positions, width, 2 * width, 2 * positions)


def rms_norm(name: str, positions: int, width: int) -> Operator:
    """A weight alone; keeps its input and one statistic of each position, as the fused kernel does."""
    return _normalisation(name, positions, width, width, positions)


def batch_norm(name: str, positions: int, channels: int) -> Operator:
    """Weight and bias; keeps its input (its statistics are by the channel, not by the row)."""
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
    """An operator that reads `inputs` tensors of [positions, width], writes one and keeps `keeps` of them."""
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
    """The sum of a branch and what went around it; the bias of the branch's last product, which no rank divides."""
    return element_wise(name, positions, width, inputs=2, weight_elements=width if bias else 0)


def dropout(name: str, positions: int, width: int, *, copies: bool = False, split: Split = Split.NONE) -> Operator:
    """Keeps one byte for each value: whether it was dropped.

    Where the operator before it keeps the same values already and the one behind it keeps what is left of them
    (`copies`), there are two of them.
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
    """Rows of a table [entries, width] by index; keeps the indices unless they are the positions themselves."""
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
    """A table of biases by relative position, which scores are given.

    It is looked up once for each micro-batch, whatever its rows, so nothing but the table itself is counted.
    """
    return Operator(
        name="position_biases",
        kind=OperatorKind.EMBEDDING,
        forward_flops_per_row=0.0,
        input_elements_per_row=0,
        output_elements_per_row=0,
        weight_elements=parameters,
        split=split,
    )


def cross_entropy(positions: int, classes: int, *, name: str = "cross_entropy") -> Operator:
    """The loss over [positions, classes]; keeps the logarithms of the probabilities, and the targets."""
    return Operator(
        name=name,
        kind=OperatorKind.CROSS_ENTROPY,
        forward_flops_per_row=0.0,
        input_elements_per_row=positions * classes,
        output_elements_per_row=1,
        positions_per_row=positions,
        saved_elements_per_row=positions * classes,
        saved_bytes_per_row=INDEX_BYTES * positions,
    )


def reduced(*operators: Operator, elements: int, backward_elements: int | None = None) -> Segment:
    """A segment at whose ends a tensor group sums so many elements of a row (backward: as many, unless told)."""
    return Segment(operators, elements, elements if backward_elements is None else backward_elements)
