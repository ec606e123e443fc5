"""Bytes of a layer under a strategy: O_f, O_b and O_ms of Galvatron's Eq. 1–3, as the exact memory model counts them."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cost import memory
from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Sharding


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer holds on one device.

    Attributes:
        kept_bytes: O_f of one micro-batch: all that its backward needs, or under CKPT the layer's input.
        state_bytes: O_ms: weights, gradients, optimizer state, and master weights beside half-precision ones.
        recomputed_bytes: of O_b: under CKPT what the forward that runs again keeps.
        gathered_bytes: of O_b: under zero3 what the layer's weights take while they are whole, and where there is one
            micro-batch alone its gradients before they are scattered.
    """

    kept_bytes: float
    state_bytes: float
    recomputed_bytes: float
    gathered_bytes: float


def layer_bytes(  # noqa: PLR0913 - a layer, its strategy, its device and where it stands
    kind: LayerKind,
    run: LayerRun,
    accelerator: str,
    setting: Setting,
    *,
    input_bytes_per_row: float,
    parameters: int,
    micro_batches: int,
) -> LayerBytes:
    """Bytes on the device with most rows; `parameters` are those that it holds at the run's tensor degree.

    Gradients stay whole until the last micro-batch has summed them; zero2 and zero3 never hold them whole where it is
    the only one.
    """
    rows = max(run.rows)
    activations = setting.layer_cost(accelerator, kind, run.tensor, rows).activation_bytes
    weight, gradient = setting.model.dtype.num_bytes, setting.gradient_dtype.num_bytes
    state = memory.optimizer_bytes(setting.model, setting.optimizer)
    part = parameters if run.sharding is Sharding.NONE else -(-parameters // run.data)
    gathers = run.sharding is Sharding.ZERO3 and run.data > 1
    scatters = micro_batches == 1 and run.sharding in {Sharding.ZERO2, Sharding.ZERO3} and run.data > 1
    states = weight * (part if gathers else parameters) + gradient * (part if scatters else parameters) + state * part
    return LayerBytes(
        rows * input_bytes_per_row if run.recompute else activations,
        states,
        activations if run.recompute else 0.0,
        parameters * (weight * gathers + gradient * scatters),
    )
