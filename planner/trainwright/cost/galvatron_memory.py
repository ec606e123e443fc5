"""Bytes of a layer under a strategy: O_f, O_b and O_ms of Galvatron's Eq. 1–3, as the exact memory model counts them."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cost import memory
from trainwright.cost.galvatron_layers import gradient_dtype
from trainwright.cost.setting import Setting
from trainwright.layer import Dtype, LayerKind
from trainwright.plan import LayerRun, Sharding


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer holds on one device.

    Attributes:
        kept_bytes: O_f of one micro-batch: all that its backward needs, or under CKPT the layer's input.
        peak_bytes: O_b: what its backward needs beside, for the time that it runs: under CKPT the recomputed
            activations, under zero3 the gathered weights of this layer and of the one gathered ahead.
        state_bytes: O_ms: weights, gradients, optimizer state, and master weights beside half-precision ones.
    """

    kept_bytes: float
    peak_bytes: float
    state_bytes: float


def layer_bytes(  # noqa: PLR0913 - a layer, its strategy, its device and where it stands
    kind: LayerKind, run: LayerRun, accelerator: str, setting: Setting, *, input_bytes_per_row: float, parameters: int
) -> LayerBytes:
    """Bytes on the device with most rows; `parameters` are those that it holds at the run's tensor degree."""
    rows = max(run.rows)
    activations = setting.layer_cost(accelerator, kind, run.tensor, rows).activation_bytes
    kept, peak = (rows * input_bytes_per_row, activations) if run.recompute else (activations, 0.0)
    if run.sharding is Sharding.ZERO3:
        peak += 2 * parameters * setting.model.dtype.num_bytes
    return LayerBytes(kept, peak, parameters * bytes_per_value(run, setting))


def bytes_per_value(run: LayerRun, setting: Setting) -> float:
    """Bytes of model states for each value that a rank computes with; sharded ones divided by the data degree.

    Under zero3 gradients stay whole until the last micro-batch has summed them.
    """
    dtype = setting.model.dtype
    weight, gradient = dtype.num_bytes, gradient_dtype(setting).num_bytes
    master = 0 if dtype is Dtype.FLOAT32 else Dtype.FLOAT32.num_bytes
    state = master + memory.OPTIMIZER_BYTES[setting.optimizer]
    if run.sharding is Sharding.ZERO3:
        return gradient + (weight + state) / run.data
    return weight + gradient + (state if run.sharding is Sharding.NONE else state / run.data)
