"""Layers of real models of every family, measured, beside what the planner estimates from the device's data sheet.

A data sheet does not know the host, which bounds small layers; how long it takes to issue an operator is measured first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial

import torch

from gpu_checks.findings import Finding, predicted, skipped
from gpu_checks.hardware import NO_GPU_SECONDS, Hardware
from gpu_checks.running import Subject
from gpu_checks.worker_commands import WorkerCommands
from trainwright.accelerators.roofline import estimate_profiles
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.model import Model
from trainwright.runtime import Runtime
from trainwright_worker.layers.layer import Output
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

BLOCK = 1
SECONDS_PER_LAYER = 0.3
AIM, LIMIT = 0.15, 0.35
"""Relative errors of a model's layers together; `bench published` errs by less than 0.15 on 8 of 10 whole runs."""

MODELS: dict[str, tuple[Family, int]] = {
    "GPT-2 medium": (Gpt(24, 1024, 16, 1024, 50257), 4),
    "GPT-2 medium, padded vocabulary": (Gpt(24, 1024, 16, 1024, 50304), 4),
    "Llama 7B": (Llama(32, 4096, 32, 4096, 32000, intermediate_size=11008), 1),
    "BERT large": (Bert(24, 1024, 16, 512, 30522), 8),
    "T5 large": (T5(24, 1024, 16, 512, 32128, decoder_sequence_length=128, intermediate_size=4096), 8),
    "Mixtral, a quarter of its width": (
        Moe(8, 1024, 16, 2048, 32000, experts=8, intermediate_size=3584, key_value_heads=4),
        2,
    ),
    "ViT-L/16": (Vit(24, 1024, 16, 224, 16), 32),
    "Swin-B": (Swin((2, 2, 18, 2), 128, (4, 8, 16, 32)), 32),
    "Wide-ResNet-50-2": (WideResnet(50, 2), 32),
    "TransGAN": (TransGan((5, 4, 4, 2), 1024, 4, bottom_width=8), 16),
}
"""Models, and rows of a micro-batch."""


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield the models."""
    if hardware.is_gpu and hardware.sheet is None:
        reason = f"there is no data sheet of {hardware.name}"
        yield Subject("data sheet", lambda: [skipped("data sheet", reason)])
        return
    models = {"GPT-2": (Gpt(2, 64, 4, 32, 256), 2)} if hardware.small else MODELS
    for name, (family, rows) in models.items():
        yield Subject(name, partial(_compare, f"{hardware.half} {name}, {rows} rows", hardware, family, rows))


def _compare(subject: str, hardware: Hardware, family: Family, rows: int) -> Iterator[Finding]:
    """Compare forward plus backward of all layers together; the figures of each kind are for one layer of it."""
    model = Model.of(family, hardware.half)
    name = hardware.name if hardware.is_gpu else "NVIDIA-A100-SXM4-40GB"
    profiles, _ = WorkerCommands(hardware).profile(model, {1: [rows]}, seconds_per_layer=SECONDS_PER_LAYER)
    runtime = Runtime(host_seconds_per_operator=host_seconds_per_operator(hardware))
    sheet = estimate_profiles(model, (name,), tensor_degrees=(1,), rows=(rows,), runtime=runtime)
    measured, estimated = 0.0, 0.0
    parts = []
    for kind, count in Counter(model.layers).items():
        costs = (profiles.cost(hardware.name, kind, 1, rows), sheet.cost(name, kind, 1, rows))
        own, expected = (cost.forward_seconds + cost.backward_seconds for cost in costs)
        measured, estimated = measured + count * own, estimated + count * expected
        parts.append(f"{count} {kind} {1e3 * own:.3g} ms ({expected / own - 1:+.0%})")
    host = f"{1e6 * runtime.host_seconds_per_operator:.0f} µs an operator on the host"
    figures = f"{1e3 * measured:.4g} ms: {', '.join(parts)}", f"{1e3 * estimated:.4g} ms, with {host},"
    if hardware.is_gpu:
        yield predicted(subject, figures, estimated / measured - 1, aim=AIM, limit=LIMIT)
    else:
        yield skipped(subject, NO_GPU_SECONDS, *figures)


@cache
def host_seconds_per_operator(hardware: Hardware) -> float:
    """Time the forward of a block so small that the host alone bounds it, between backwards as in training."""
    gpt = Gpt(1, 64, 4, 8, 64)
    model = Model.of(gpt, hardware.half)
    layer = make_family_layers(model).make(BLOCK, seed=0, shard=TensorShard(), shared={})
    layer.to(hardware.device, hardware.torch_half)
    shape = 1, gpt.sequence_length, gpt.hidden_size
    hidden, gradient = (torch.randn(shape, device=hardware.device, dtype=hardware.torch_half) for _ in range(2))
    hidden.requires_grad_()
    outputs: list[Output] = []
    seconds, _ = hardware.seconds_of(
        lambda: outputs.append(layer((hidden,), {})), lambda: outputs.pop().backward((gradient,))
    )
    return seconds / len(model.kind_of(BLOCK).operators)
