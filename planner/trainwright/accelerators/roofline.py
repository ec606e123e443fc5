"""Layer profiles estimated from data sheets, for planning before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trainwright.accelerators.efficiency import HOST_SECONDS, KERNEL_SECONDS
from trainwright.accelerators.kernels import Array, OperatorSeconds, Roof, operator_seconds
from trainwright.accelerators.sheet import data_sheet
from trainwright.layer import Dtype, LayerKind
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles
from trainwright.training import Optimizer

UPDATE_BYTES: Final[dict[Optimizer, int]] = {"adam": 72, "sgd": 32}
"""Memory traffic of an optimizer's step for each value, all in float32: one kernel after the other, as PyTorch's
optimizers run by default. Adam: interpolate the first moment (12 bytes), scale (8) and add to (12) the second, its
root (8), divided (8) and shifted (8), and the weight (16). SGD: scale (8) and add to (12) the momentum, and the weight
(12). A fused step would move 28 and 20; measured steps of whole frameworks move more, clipping and copies included."""


def estimate_profiles(  # noqa: PLR0913 - what profiles depend on
    model: Model,
    accelerators: Sequence[str],
    *,
    tensor_degrees: Sequence[int],
    rows: Sequence[int],
    optimizer: Optimizer = "adam",
    tensor_float32: bool = False,
) -> Profiles:
    """Profiles of every layer kind on every accelerator, marked as estimated.

    Kinds that are not tensor parallel are profiled at degree 1 alone. Collectives are not included.

    The profiles carry the accelerators' names as given, which may be aliases. `tensor_float32` says whether matrix
    products of float32 values may run in TF32 where the device has it; PyTorch leaves that off by default for matrix
    products (and on for convolutions, which are not told apart here).

    Raises ValueError for an accelerator without a data sheet, naming the nearest that have one, and for a tensor degree
    that does not divide the model or rows below 1.
    """
    if min(rows, default=1) < 1:
        raise ValueError(f"a profile needs at least 1 row, got {min(rows)}")
    for degree in tensor_degrees:
        if degree < 1 or model.max_tensor_degree % degree:
            raise ValueError(
                f"tensor degree {degree} does not divide {model.max_tensor_degree}, the most of this model"
            )
    found: list[LayerProfile] = []
    for accelerator in dict.fromkeys(accelerators):
        roof = Roof.of(data_sheet(accelerator), model.dtype, tensor_float32=tensor_float32)
        for kind in model.kinds:
            degrees = sorted(set(tensor_degrees)) if kind.is_tensor_parallel else [1]
            found += _kind_profiles(kind, model.dtype, accelerator, roof, degrees, sorted(set(rows)), optimizer)
    return Profiles(tuple(found), origin="estimated")


def layer_seconds(kind: LayerKind, roof: Roof, degrees: Sequence[int], rows: Sequence[int]) -> OperatorSeconds:
    """Forward and backward seconds of a layer, by [degree, rows]: of the device or of the host, whichever is longer."""
    by_degree: Array = np.array(degrees, dtype=np.float64)[:, None] * np.ones(len(rows))
    by_rows: Array = np.array(rows, dtype=np.float64)[None, :] * np.ones((len(degrees), 1))
    times = [operator_seconds(operator, roof, by_degree, by_rows) for operator in kind.operators]
    host = HOST_SECONDS * len(times)
    return OperatorSeconds(
        np.maximum(np.sum([time.forward for time in times], axis=0), host),
        np.maximum(np.sum([time.backward for time in times], axis=0), host),
    )


def update_seconds(parameters: int, roof: Roof, optimizer: Optimizer) -> float:
    """Seconds of the optimizer's step on so many values; memory limits it."""
    return max(parameters * UPDATE_BYTES[optimizer] / roof.bytes_per_second, KERNEL_SECONDS)


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
            update_seconds=update_seconds(kind.parameters_at(degree), roof, optimizer),
            activation_bytes=round(row * kind.saved_bytes_per_row(dtype, degree)),
            parameter_bytes=kind.parameters_at(degree) * dtype.num_bytes,
        )
        for i, degree in enumerate(degrees)
        for j, row in enumerate(rows)
    ]
