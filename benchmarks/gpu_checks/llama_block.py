"""One block of Llama-7B: seconds of its passes at 1 × 4096, and the utilisation of the device's peak."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from gpu_checks.findings import Finding, judged, skipped
from gpu_checks.hardware import NO_GPU_SECONDS, Hardware
from gpu_checks.running import Subject
from trainwright.families import Llama
from trainwright.model import Model
from trainwright_worker.layers.layer import Output
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

BLOCK = 1
KNOWN = "NVIDIA-H200"
FORWARD_MILLISECONDS = 2.6, 3.6
"""Range of the forward on the known accelerator."""
MIN_UTILISATION = 0.55


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield the block."""
    yield Subject("Llama-7B block, 1 × 4096", partial(_find, hardware))


def _find(hardware: Hardware) -> Iterator[Finding]:
    llama = Llama(1, 64, 4, 32, 64) if hardware.small else Llama(1, 4096, 32, 4096, 1024, intermediate_size=11008)
    model, device = Model.of(llama, hardware.half), hardware.device
    layer = make_family_layers(model).make(BLOCK, seed=0, shard=TensorShard(), shared={})
    layer.to(device, hardware.torch_half)
    shape = 1, llama.sequence_length, llama.hidden_size
    hidden, gradient = (torch.randn(shape, device=device, dtype=hardware.torch_half) for _ in range(2))
    hidden.requires_grad_()
    outputs: list[Output] = []

    def forward() -> None:
        outputs.append(layer((hidden,), {}))

    def backward() -> None:
        outputs.pop().backward((gradient,))
        layer.zero_grad()
        hidden.grad = None

    seconds, backward_seconds = hardware.seconds_of(forward, backward)
    subject = f"{hardware.half} Llama-7B block, 1 × {llama.sequence_length}"
    measured = f"forward {1e3 * seconds:.2f} ms, backward {1e3 * backward_seconds:.2f} ms"
    low, high = FORWARD_MILLISECONDS
    expected = f"forward {low} to {high} ms on an H200"
    if not hardware.is_gpu:
        yield skipped(subject, NO_GPU_SECONDS, measured, expected)
        return
    sheet = hardware.sheet
    if sheet is None or sheet.name != KNOWN:
        yield skipped(subject, f"the range is not known for {hardware.name}", measured, expected)
    else:
        yield judged(subject, measured, expected, holds=low <= 1e3 * seconds <= high)
    if sheet is None:
        return
    flops = 3 * model.kind_of(BLOCK).forward_flops_per_row
    share = flops / (seconds + backward_seconds) / sheet.flops_per_second(hardware.half)
    measured, expected = f"{share:.0%} of the data sheet's peak", f"at least {MIN_UTILISATION:.0%} on an H200"
    if sheet.name == KNOWN:
        yield judged(f"{subject}: utilisation", measured, expected, holds=share >= MIN_UTILISATION)
    else:
        yield skipped(f"{subject}: utilisation", f"the least is not known for {hardware.name}", measured, expected)
