"""Seconds of single operators on one device by the roofline model (Williams, Waterman and Patterson 2009).

An operator takes the longest of: its arithmetic at the reachable rate, its memory traffic at the reachable bandwidth,
and the launch of a kernel. Matrix products are computed in whole tiles and whole waves of tiles over the
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
    LAUNCH_SECONDS,
    MEMORY_RATIO,
    TILES,
    TRAFFIC_RATIO,
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
        """The longest of arithmetic, memory traffic and launch."""
        return np.maximum(np.maximum(compute_seconds, traffic_bytes / self.bytes_per_second), LAUNCH_SECONDS)

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
    """Forward C = A B; backward A' = C' Bᵀ and B' = Aᵀ C', each as many FLOPs as the forward."""
    positions = operator.positions_per_row
    half_flops = operator.forward_flops_per_row / 2
    inner = half_flops / operator.output_elements_per_row
    columns = operator.output_elements_per_row / positions
    narrower = columns / _divisor(operator, degrees, Split.COLUMN, Split.WHOLE)
    shorter = inner / _divisor(operator, degrees, Split.ROW)
    height = positions * rows
    outputs = height * narrower
    if operator.kind is OperatorKind.BATCHED_MATMUL:
        second = inner * outputs / positions
        inputs = rows * operator.input_elements_per_row / degrees - second
        first_inner = half_flops * rows / degrees / inputs
        second_rows, second_inner = height, np.full_like(outputs, positions)
    else:
        second = shorter * narrower * np.ones_like(height)
        inputs = rows * operator.input_elements_per_row / _divisor(operator, degrees, Split.ROW)
        first_inner = narrower
        second_rows, second_inner = shorter, height
    traffic = (inputs + outputs + second) * roof.value_bytes
    forward = roof.seconds(roof.product_seconds(height, narrower, shorter), traffic)
    to_first = roof.seconds(roof.product_seconds(height, inputs / height, first_inner), traffic)
    to_second = roof.seconds(roof.product_seconds(second_rows, second / second_rows, second_inner), traffic)
    accumulation = 3 * operator.weight_elements * roof.value_bytes / _divisor(operator, degrees) / roof.bytes_per_second
    return OperatorSeconds(forward, to_first + to_second + accumulation)


def _attention(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    share = rows / _divisor(operator, degrees)
    compute = operator.forward_flops_per_row * share / roof.attention_flops_per_second
    traffic = (operator.input_elements_per_row + operator.output_elements_per_row) * share * roof.value_bytes
    backward = roof.seconds(BACKWARD_ATTENTION_PRODUCTS * compute, 2 * traffic)
    return OperatorSeconds(roof.seconds(compute, traffic), backward)


def _streaming(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    """Reads its input and writes its output; backward also reads what was kept. Losses are computed in float32."""
    share = rows / _divisor(operator, degrees)
    value_bytes = Dtype.FLOAT32.num_bytes if operator.kind is OperatorKind.CROSS_ENTROPY else roof.value_bytes
    passes = TRAFFIC_RATIO.get(operator.kind, 1.0)
    moved = (operator.input_elements_per_row + operator.output_elements_per_row) * share * value_bytes
    kept = (operator.saved_elements_per_row * value_bytes + operator.saved_bytes_per_row) * share
    weights = operator.weight_elements / _divisor(operator, degrees) * roof.value_bytes
    return OperatorSeconds(roof.seconds(0.0, passes * moved), roof.seconds(0.0, passes * moved + kept + 3 * weights))


def _divisor(operator: Operator, degrees: Array, *splits: Split) -> Array:
    """The degrees where the operator is split in one of these ways (none given: in any), 1 elsewhere."""
    divided = operator.split in splits if splits else operator.split is not Split.NONE
    return degrees if divided else np.ones_like(degrees)
