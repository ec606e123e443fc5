"""Measurement of a torch layer's parameters, FLOPs and saved bytes by running its forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from torch_models.parts import Reference


@dataclass(frozen=True)
class Measured:
    """Counts of one layer, per row except for its parameters."""

    parameters: int
    flops: float
    saved_bytes: float
    boundary: float


def measure(reference: Reference, device: str, dtype: torch.dtype, *, rows: tuple[int, int] = (2, 4)) -> Measured:
    """Differences between two row counts, so that what does not depend on the rows drops out.

    Kept are storages, each once, without parameters and without what only the next layer reads: autograd holds some
    outputs already here (ReLU's), and the planner counts a boundary at its reader.
    """
    module = reference.module.to(device=device, dtype=dtype)
    few, many = (_run(module, reference.inputs(count, device, dtype)) for count in rows)
    more = rows[1] - rows[0]
    flops, saved, boundary = ((b - a) / more for a, b in zip(few, many, strict=True))
    is_loss = boundary == 0
    return Measured(sum(p.numel() for p in module.parameters()), flops, saved, 1 if is_loss else boundary)


def _run(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[int, int, int]:
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    given = {tensor.untyped_storage()._cdata for tensor in inputs}
    weights = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    handed_on = {tensor.untyped_storage()._cdata for tensor in outputs} - given
    kept = sum(storage.nbytes() for key, storage in storages.items() if key not in weights | handed_on)
    return counter.get_total_flops(), kept, sum(tensor.numel() for tensor in outputs)
