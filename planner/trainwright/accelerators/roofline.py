"""Layer profiles estimated from data sheets by the roofline model (Williams, Waterman and Patterson 2009).

An operator takes the longest of its arithmetic at the achievable rate, its memory traffic at the achievable bandwidth,
and the minimum time of a kernel. Matrix products run in full tiles and full waves of tiles over the multiprocessors, so
small and skinny products reach less of the rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwright.accelerators.data_sheets import DataSheet, data_sheet
from trainwright.accelerators.efficiency import (
    ATTENTION_BLOCK,
    BACKWARD_ATTENTION_PRODUCTS,
    BACKWARD_HOST_RATIO,
    BACKWARD_KERNEL_RATIO,
    CALLS_PER_OPERATOR,
    INNER_OVERHEAD,
    KERNEL_SECONDS,
    MEMORY_RATIO,
    STREAMING_RATIOS,
    TILES,
)
from trainwright.accelerators.selective_recompute import recomputed_shares, saved_bytes
from trainwright.layer import Attention, Dtype, LayerKind, Operator, OperatorKind, Split
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Kernels, Runtime, SelectiveRecompute
from trainwright.training import Optimizer

Array = NDArray[np.float64]

PRODUCTS = {OperatorKind.MATMUL, OperatorKind.BATCHED_MATMUL, OperatorKind.CONVOLUTION}


@dataclass(frozen=True, slots=True)
class Roof:
    """Achievable rates of one device in one number format.

    Attributes:
        attention_flops_per_second: in fused attention.
        streaming_ratio: actual over ideal traffic of operators that memory bounds.
        skips_hidden_scores: whether a fused softmax reads no scores that a causal mask hides.
        fuses_loss, selective_recompute, host_seconds_per_operator: as the runtime states.
        update_bytes_per_parameter, update_calls_per_tensor: of the optimizer's step, likewise.
        value_bytes: of one activation or weight.
    """

    flops_per_second: float
    attention_flops_per_second: float
    bytes_per_second: float
    multiprocessors: int
    value_bytes: int
    streaming_ratio: float
    host_seconds_per_operator: float
    skips_hidden_scores: bool = False
    fuses_loss: bool = False
    selective_recompute: SelectiveRecompute | None = None
    update_bytes_per_parameter: float = 0.0
    update_calls_per_tensor: int = 0

    @classmethod
    def of(cls, sheet: DataSheet, dtype: Dtype, *, tensor_float32: bool, runtime: Runtime | None = None) -> Roof:
        """Derive the rates from a data sheet, as a runtime uses them; its power limit may cap them."""
        used = runtime or Runtime()
        efficiency = sheet.generation_sheet.efficiency
        peak = sheet.flops_per_second(dtype, tensor_float32=tensor_float32)
        if sheet.uses_matrix_units(dtype, tensor_float32=tensor_float32):
            ratio, flops_per_joule = efficiency.matrix, efficiency.matrix_flops_per_joule
            tuning = used.product_ratio
        else:
            ratio, flops_per_joule, tuning = efficiency.general, efficiency.general_flops_per_joule, 1.0
        rate = min(peak * ratio, sheet.power_watts.value * flops_per_joule)
        return cls(
            flops_per_second=rate * tuning,
            attention_flops_per_second=rate * efficiency.attention_ratio(used.attention_library),
            bytes_per_second=sheet.memory_bytes_per_second.value * MEMORY_RATIO,
            multiprocessors=int(sheet.multiprocessors.value),
            value_bytes=dtype.num_bytes,
            streaming_ratio=STREAMING_RATIOS[used.kernels],
            host_seconds_per_operator=used.host_seconds_per_operator,
            skips_hidden_scores=used.kernels is not Kernels.EAGER,
            fuses_loss=used.fuses_loss,
            selective_recompute=used.selective_recompute,
            update_bytes_per_parameter=used.update_bytes_per_parameter,
            update_calls_per_tensor=used.update_calls_per_tensor,
        )

    def seconds(self, compute_seconds: Array | float, traffic_bytes: Array | float) -> Array:
        """Return the longest of arithmetic, memory traffic and the minimum time of a kernel."""
        return np.maximum(np.maximum(compute_seconds, traffic_bytes / self.bytes_per_second), KERNEL_SECONDS)

    def product_seconds(self, rows: Array, columns: Array, inner: Array) -> Array:
        """Return arithmetic seconds of a product [rows, inner] × [inner, columns], in full waves of full tiles."""
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
    """Forward and backward seconds, as arrays over tensor degrees and rows."""

    forward: Array
    backward: Array


def operator_seconds(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    """Return seconds on one of `degrees` ranks for `rows` rows (arrays that broadcast), without collectives."""
    if operator.calls > 1:
        single = operator_seconds(_one_call(operator), roof, degrees, rows)
        return OperatorSeconds(operator.calls * single.forward, operator.calls * single.backward)
    if operator.kind in PRODUCTS:
        return _product(operator, roof, degrees, rows)
    if operator.kind is OperatorKind.ATTENTION:
        return _attention(operator, roof, degrees, rows)
    if operator.kind is OperatorKind.CROSS_ENTROPY and roof.fuses_loss:
        logits = operator.input_elements_per_row * rows / _divisor(operator, degrees) * roof.value_bytes
        return OperatorSeconds(roof.seconds(0.0, logits), roof.seconds(0.0, 2 * logits))
    return _memory_bound(operator, roof, degrees, rows)


def _one_call(operator: Operator) -> Operator:
    calls = operator.calls
    return replace(
        operator,
        forward_flops_per_row=operator.forward_flops_per_row / calls,
        input_elements_per_row=operator.input_elements_per_row / calls,
        output_elements_per_row=operator.output_elements_per_row / calls,
        calls=1,
    )


def _product(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    """Return seconds of forward C = A B and backward A' = C' Bᵀ and B' = Aᵀ C', with equal FLOPs each.

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
        weight_elements = operator.weight_elements / _divisor(operator, degrees)
        second = inner * width * np.maximum(np.floor(weight_elements / (inner * width)), 1.0)  # one matrix per expert
        first = inputs
    traffic = (first + outputs + second) * roof.value_bytes
    forward = roof.seconds(roof.product_seconds(height, width, inner), traffic)
    to_first = roof.seconds(roof.product_seconds(height, first / height, half_flops / first), traffic)
    to_second = roof.seconds(roof.product_seconds(second / width, width, half_flops / second), traffic)
    # Gradients accumulate over micro-batches: two reads, one write.
    accumulation = 3 * operator.weight_elements * roof.value_bytes / _divisor(operator, degrees) / roof.bytes_per_second
    return OperatorSeconds(forward, to_first + to_second + accumulation)


def _attention(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    share = rows / _divisor(operator, degrees)
    compute = _visible(operator) * operator.forward_flops_per_row * share / roof.attention_flops_per_second
    traffic = (operator.input_elements_per_row + operator.output_elements_per_row) * share * roof.value_bytes
    backward = roof.seconds(BACKWARD_ATTENTION_PRODUCTS * compute, 2 * traffic)
    return OperatorSeconds(roof.seconds(compute, traffic), backward)


def _visible(operator: Operator) -> float:
    """Return the share of the scores in blocks that a causal mask does not hide; 1 without one."""
    blocks = max(operator.positions_per_row / ATTENTION_BLOCK, 1.0)
    return (1 + 1 / blocks) / 2 if operator.is_causal else 1.0


def _memory_bound(operator: Operator, roof: Roof, degrees: Array, rows: Array) -> OperatorSeconds:
    """Return seconds of an operator that reads its input and writes its output.

    Its backward reads and writes their gradients and reads the saved activations.
    """
    share = rows / _divisor(operator, degrees)
    if operator.is_causal and roof.skips_hidden_scores:
        share = share * (1 + _visible(operator)) / 2  # hidden scores are not read, but written as zeros
    is_loss = operator.kind is OperatorKind.CROSS_ENTROPY
    value_bytes = Dtype.FLOAT32.num_bytes if is_loss else roof.value_bytes  # losses are computed in float32
    moved = (operator.input_elements_per_row + operator.output_elements_per_row) * share * value_bytes
    kept = (operator.saved_elements_per_row * value_bytes + operator.saved_bytes_per_row) * share
    written = kept if is_loss else 0.0  # the log-probabilities are neither its input nor its output
    weights = 3 * operator.weight_elements / _divisor(operator, degrees) * roof.value_bytes
    streamed = 1.0 if operator.kind is OperatorKind.EMBEDDING else roof.streaming_ratio
    forward, backward = streamed * (moved + written), streamed * (moved + kept) + weights
    if (traffic := operator.traffic) is not None:
        forward = streamed * share * (traffic.forward_elements * value_bytes + traffic.forward_bytes)
        backward = streamed * share * (traffic.backward_elements * value_bytes + traffic.backward_bytes) + weights
    return OperatorSeconds(roof.seconds(0.0, forward), roof.seconds(0.0, backward))


def _divisor(operator: Operator, degrees: Array, *splits: Split) -> Array:
    """Return the degrees if the operator is split in one of these ways (none given: in any), else 1."""
    divided = operator.split in splits if splits else operator.split is not Split.NONE
    return degrees if divided else np.ones_like(degrees)


UPDATE_BYTES: Final[dict[Optimizer, int]] = {"adam": 28, "sgd": 20}
"""Memory traffic of an optimizer's fused step per parameter, all in float32, as the worker runs it (PyTorch's
`_fused_adam_` and `_fused_sgd_`): weight, gradient and moments are read, weight and moments written. Clipping is not
included.
"""
UNSCALING_BYTES: Final = 8
"""Memory traffic of float16's loss scale per parameter: gradients are read for their norm, which shows whether one of them
overflowed, and the fused step writes them unscaled.
"""


def estimate_profiles(  # noqa: PLR0913 - what profiles depend on
    model: Model,
    accelerators: Sequence[str],
    *,
    tensor_degrees: Sequence[int],
    rows: Sequence[int],
    optimizer: Optimizer = "adam",
    tensor_float32: bool = False,
    runtime: Runtime | None = None,
    power_watts: Mapping[str, float] | None = None,
) -> Profiles:
    """Estimate profiles of every layer kind on every accelerator, marked as estimated.

    Kinds that no tensor degree divides are profiled at degree 1 only; collectives are not included. Profiles carry the
    accelerators' names as given, which may be aliases. `tensor_float32` lets matrix products of float32 tensors run in
    TF32 where the device has it; PyTorch's default is off for matrix products (and on for convolutions, which are not
    distinguished here). The runtime states the kernels. `power_watts` are power limits by accelerator, in place of the data
    sheets'.

    Raises ValueError for an accelerator without a data sheet, a tensor degree that does not divide the model, and rows
    below 1.
    """
    if min(rows, default=1) < 1:
        raise ValueError(f"a profile needs at least 1 row, got {min(rows)}")
    for degree in tensor_degrees:
        if degree < 1 or model.max_tensor_degree % degree:
            raise ValueError(
                f"tensor degree {degree} does not divide {model.max_tensor_degree}, the most of this model"
            )
    profiles: list[LayerProfile] = []
    for accelerator in dict.fromkeys(accelerators):
        sheet = data_sheet(accelerator).limited_to((power_watts or {}).get(accelerator))
        roof = Roof.of(sheet, model.dtype, tensor_float32=tensor_float32, runtime=runtime)
        for kind in kinds_on(accelerator, model, runtime):
            divided = model.divided_kind(kind) or kind
            degrees = sorted(set(tensor_degrees)) if divided.is_tensor_parallel else [1]
            profiles += _kind_profiles(divided, model.dtype, accelerator, roof, degrees, sorted(set(rows)), optimizer)
    return Profiles(tuple(profiles), origin="estimated")


def estimate_kind(  # noqa: PLR0913 - what profiles depend on
    name: str,
    model: Model,
    accelerator: str,
    degree: int,
    rows: Sequence[int],
    *,
    optimizer: Optimizer = "adam",
    runtime: Runtime | None = None,
    power_watts: float | None = None,
) -> list[LayerProfile]:
    """Estimate the profiles of one layer kind at one tensor degree, in the order of the rows, as `estimate_profiles`.

    Raises ValueError for an accelerator without a data sheet.
    """
    kind = next(kind for kind in kinds_on(accelerator, model, runtime) if kind.name == name)
    roof = Roof.of(data_sheet(accelerator).limited_to(power_watts), model.dtype, tensor_float32=False, runtime=runtime)
    return _kind_profiles(model.divided_kind(kind) or kind, model.dtype, accelerator, roof, [degree], rows, optimizer)


def product_slowdown(sheet: DataSheet, dtype: Dtype, power_watts: float) -> float:
    """Return how many times as long large matrix products are estimated to take under another power limit."""
    full, limited = (Roof.of(each, dtype, tensor_float32=False) for each in (sheet, sheet.limited_to(power_watts)))
    return full.flops_per_second / limited.flops_per_second


def kinds_on(accelerator: str, model: Model, runtime: Runtime | None) -> tuple[LayerKind, ...]:
    """Return the model's kinds with the attention that the runtime has for its number format on an accelerator."""
    attention = data_sheet(accelerator).attention((runtime or Runtime()).attention_library, model.dtype)
    if attention is Attention.FUSED:
        return model.kinds
    without = Model.of(model.family, model.dtype, attention)
    return tuple(without.kind(kind.name) if _is_fused(kind) else kind for kind in model.kinds)


def _is_fused(kind: LayerKind) -> bool:
    return any(operator.kind is OperatorKind.ATTENTION for operator in kind.operators)


def layer_seconds(kind: LayerKind, roof: Roof, degrees: Sequence[int], rows: Sequence[int]) -> OperatorSeconds:
    """Return `[degree, rows]` forward and backward seconds of a layer: the longer of device and host time.

    The host runs ahead of the device, so a layer does not take their sum.
    """
    device, host = device_seconds(kind, roof, degrees, rows), host_seconds(kind, roof)
    return OperatorSeconds(np.maximum(device.forward, host[0]), np.maximum(device.backward, host[1]))


def host_seconds(kind: LayerKind, roof: Roof) -> tuple[float, float]:
    """Return the seconds in which the host issues a layer's forward and backward.

    Where kernels were counted, no device runs them faster than one after another.
    """
    if kind.forward_kernels:
        forward, backward = roof.host_seconds_per_operator, BACKWARD_KERNEL_RATIO * roof.host_seconds_per_operator
        return (
            max(forward, KERNEL_SECONDS) * kind.forward_kernels,
            max(backward, KERNEL_SECONDS) * kind.backward_kernels,
        )
    forward = roof.host_seconds_per_operator * len(kind.operators)
    again = roof.host_seconds_per_operator * float(np.sum(recomputed_shares(kind, roof.selective_recompute)))
    return forward, BACKWARD_HOST_RATIO * forward + again


def device_seconds(kind: LayerKind, roof: Roof, degrees: Sequence[int], rows: Sequence[int]) -> OperatorSeconds:
    """Return `[degree, rows]` forward and backward seconds of a layer on a device that waits for no host."""
    by_degree: Array = np.array(degrees, dtype=np.float64)[:, None] * np.ones(len(rows))
    by_rows: Array = np.array(rows, dtype=np.float64)[None, :] * np.ones((len(degrees), 1))
    times = [operator_seconds(operator, roof, by_degree, by_rows) for operator in kind.operators]
    forward = np.array([time.forward for time in times])
    again = np.tensordot(recomputed_shares(kind, roof.selective_recompute), forward, axes=1)
    # Traffic that was counted has the shortened backward already.
    shares = [kind.backward_share if operator.traffic is None else 1.0 for operator in kind.operators]
    backward = np.sum([share * time.backward for share, time in zip(shares, times, strict=True)], axis=0)
    return OperatorSeconds(np.sum(forward, axis=0), backward + again)


def _saved_bytes(kind: LayerKind, roof: Roof, dtype: Dtype, degree: int, rows: int) -> float:
    """Return what one rank saves for the backward; a fused loss keeps no log-probabilities besides the logits."""
    saved = saved_bytes(kind, roof.selective_recompute, dtype, degree, rows)
    losses = [
        operator for operator in kind.operators if operator.kind is OperatorKind.CROSS_ENTROPY and roof.fuses_loss
    ]
    return saved - rows * sum(loss.saved_bytes(dtype, degree) for loss in losses)


def update_seconds(kind: LayerKind, degree: int, roof: Roof, optimizer: Optimizer, dtype: Dtype) -> float:
    """Return seconds of the optimizer's step of one layer, which memory limits, or the host where it is not fused.

    In half precision the float32 weights are read once more and written in that format: Adam moves 34 bytes in all, and 42
    where gradients are unscaled. A runtime may state what its step moves in all.
    """
    parameters = kind.parameters_at(degree) - kind.frozen_parameters
    float32_bytes = Dtype.FLOAT32.num_bytes
    copied = float32_bytes + roof.value_bytes if roof.value_bytes < float32_bytes else 0
    unscaled = UNSCALING_BYTES if dtype is Dtype.FLOAT16 else 0
    moved = roof.update_bytes_per_parameter or UPDATE_BYTES[optimizer] + copied + unscaled
    calls = roof.update_calls_per_tensor * kind.weight_tensors
    host = calls * roof.host_seconds_per_operator / CALLS_PER_OPERATOR
    return max(parameters * moved / roof.bytes_per_second, host, KERNEL_SECONDS)


def _kind_profiles(  # noqa: PLR0913, PLR0917 - one point of a table
    kind: LayerKind,
    dtype: Dtype,
    accelerator: str,
    roof: Roof,
    degrees: Sequence[int],
    rows: Sequence[int],
    optimizer: Optimizer,
) -> list[LayerProfile]:
    seconds = layer_seconds(kind, roof, degrees, rows)
    return [
        LayerProfile(
            accelerator=accelerator,
            kind=kind.name,
            tensor_degree=degree,
            rows=row,
            forward_seconds=float(seconds.forward[i, j]),
            backward_seconds=float(seconds.backward[i, j]),
            update_seconds=update_seconds(kind, degree, roof, optimizer, dtype),
            activation_bytes=round(_saved_bytes(kind, roof, dtype, degree, row)),
            parameter_bytes=kind.parameters_at(degree) * dtype.num_bytes,
        )
        for i, degree in enumerate(degrees)
        for j, row in enumerate(rows)
    ]
