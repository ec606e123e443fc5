"""Seconds of single operators on one device by the roofline model (Williams, Waterman and Patterson 2009).

An operator takes the longest of: its arithmetic at the reachable rate, its memory traffic at the reachable bandwidth,
and the least time of a kernel. Matrix products are computed in whole tiles and whole waves of tiles over the
multiprocessors, so small and skinny products reach less of the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.accelerators.efficiency import (
    BACKWARD_ATTENTION_PRODUCTS,
    EFFICIENCIES,
    INNER_OVERHEAD,
    KERNEL_SECONDS,
    MEMORY_RATIO,
    SOFTMAX_KERNELS,
    TILES,
)
from trainwright.accelerators.sheet import DataSheet
from trainwright.layer import Dtype, Operator, OperatorKind, Split

Array = NDArray[np.float64]

PRODUCTS = {OperatorKind.MATMUL, OperatorKind.BATCHED_MATMUL, OperatorKind.CONVOLUTION}


@dataclass(frozen=True, slots=True)
class Roof:
    """What one device reaches in one number format.

    Attributes:
        attention_flops_per_second: in fused attention.
        value_bytes: of one activation or weight.
    """

    flops_per_second: float
    attention_flops_per_second: float
    bytes_per_second: float
    multiprocessors: int
    value_bytes: int

    @classmethod
    def of(cls, sheet: DataSheet, dtype: Dtype, *, tensor_float32: bool) -> Roof:
        """The reachable rates of a device."""
        efficiency = EFFICIENCIES[sheet.generation]
        peak = sheet.flops_per_second(dtype, tensor_float32=tensor_float32)
        if sheet.uses_matrix_units(dtype, tensor_float32=tensor_float32):
            ratio, flops_per_joule = efficiency.matrix_ratio, efficiency.matrix_flops_per_joule
        else:
            ratio, flops_per_joule = efficiency.general_ratio, efficiency.general_flops_per_joule
        rate = min(peak * ratio, sheet.power_watts.value * flops_per_joule)
        return cls(
            flops_per_second=rate,
            attention_flops_per_second=rate * efficiency.attention_ratio,
            bytes_per_second=sheet.memory_bytes_per_second.value * MEMORY_RATIO,
            multiprocessors=int(sheet.multiprocessors.value),
            value_bytes=dtype.num_bytes,
        )

    def seconds(self, compute_seconds: Array | float, traffic_bytes: Array | float) -> Array:
        """The longest of arithmetic, memory traffic and the least time of a kernel."""
        return np.maximum(np.maximum(compute_seconds, traffic_bytes / self.bytes_per_second), KERNEL_SECONDS)

    def product_seconds(self, rows: Array, columns: Array, inner: Array) -> Array:
        """Arithmetic of a matrix product [rows, inner] × [inner, columns], in whole waves of whole tiles."""
        best = np.full(np.broadcast(rows, columns, inner).shape, np.inf)
        for tile in TILES:
            tiles = np.ceil(rows / tile.rows) * np.ceil(columns / tile.columns) * tile.splits
            waves = np.ceil(tiles / self.multiprocessors)
            steps = np.ceil(inner / tile.splits) + INNER_OVERHEAD
            flops = 2.0 * waves * self.multiprocessors * tile.rows * tile.columns * steps
            best = np.minimum(best, flops / (self.flops_per_second * tile.ratio))
        return best


@dataclass(frozen=True, slots=True)
class OperatorSeconds:
    """Forward and backward of one operator, for arrays of tensor degrees and rows."""

    forward: Array
    backward: Array


def operator_seconds(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    """Seconds on one of `degrees` ranks for `rows` rows (arrays that broadcast), collectives not included."""
    if operator.kind in PRODUCTS:
        return _product(operator, roof, degrees, rows)
    if operator.kind is OperatorKind.ATTENTION:
        return _attention(operator, roof, degrees, rows)
    return _streaming(operator, roof, degrees, rows)


def _product(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    """Forward C = A B; backward A' = C' Bᵀ and B' = Aᵀ C', each as many FLOPs as the forward.

    A convolution counts as the product of its unfolded input (positions × inner) and its kernel.
    """
    half_flops = operator.forward_flops_per_row / 2 * rows / _divisor(operator, degrees)
    height = operator.positions_per_row * rows
    outputs = rows * operator.output_elements_per_row / _divisor(operator, degrees, Split.COLUMN, Split.WHOLE)
    inputs = rows * operator.input_elements_per_row / _divisor(operator, degrees, Split.ROW, Split.WHOLE)
    width, inner = outputs / height, half_flops / outputs
    if operator.kind is OperatorKind.BATCHED_MATMUL:  # A and B are both among the inputs
        second = inner * width * rows
        second = np.where(second < inputs, second, inputs / 2)
        first = inputs - second
    else:
        held = operator.weight_elements / _divisor(operator, degrees)
        second = inner * width * np.maximum(np.floor(held / (inner * width)), 1.0)  # several where there are experts
        first = inputs
    traffic = (first + outputs + second) * roof.value_bytes
    forward = roof.seconds(roof.product_seconds(height, width, inner), traffic)
    to_first = roof.seconds(roof.product_seconds(height, first / height, half_flops / first), traffic)
    to_second = roof.seconds(roof.product_seconds(second / width, width, half_flops / second), traffic)
    # A gradient is added to what earlier micro-batches left: two reads, one write.
    accumulation = 3 * operator.weight_elements * roof.value_bytes / _divisor(operator, degrees) / roof.bytes_per_second
    return OperatorSeconds(forward, to_first + to_second + accumulation)


def _attention(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    share = rows / _divisor(operator, degrees)
    compute = operator.forward_flops_per_row * share / roof.attention_flops_per_second
    traffic = (operator.input_elements_per_row + operator.output_elements_per_row) * share * roof.value_bytes
    backward = roof.seconds(BACKWARD_ATTENTION_PRODUCTS * compute, 2 * traffic)
    return OperatorSeconds(roof.seconds(compute, traffic), backward)


def _streaming(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    """Reads its input and writes its output; backward reads and writes their gradients and reads what was kept."""
    share = rows / _divisor(operator, degrees)
    is_loss = operator.kind is OperatorKind.CROSS_ENTROPY
    value_bytes = Dtype.FLOAT32.num_bytes if is_loss else roof.value_bytes  # losses are computed in float32
    kernels = SOFTMAX_KERNELS if operator.kind is OperatorKind.SOFTMAX else 1
    moved = kernels * (operator.input_elements_per_row + operator.output_elements_per_row) * share * value_bytes
    kept = (operator.saved_elements_per_row * value_bytes + operator.saved_bytes_per_row) * share
    written = kept if is_loss else 0.0  # the log-probabilities are neither its input nor its output
    weights = 3 * operator.weight_elements / _divisor(operator, degrees) * roof.value_bytes
    return OperatorSeconds(roof.seconds(0.0, moved + written), roof.seconds(0.0, moved + kept + weights))


def _divisor(operator: Operator, degrees: Array, *splits: Split) -> Array:
    """The degrees where the operator is split in one of these ways (none given: in any), 1 elsewhere."""
    divided = operator.split in splits if splits else operator.split is not Split.NONE
    return degrees if divided else np.ones_like(degrees)
