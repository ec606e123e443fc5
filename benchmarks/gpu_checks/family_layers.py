"""Layers of every family on the device: gradients against the CPU, kept bytes, and the attention kernel."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial

import torch
from kept_bytes import beside, kept
from layer_runs import made, run
from torch import Tensor

from gpu_checks.findings import Finding, judged, skipped
from gpu_checks.hardware import Hardware, kernels_before_ampere
from gpu_checks.running import Subject
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import STORES_SCORES
from trainwright_worker.executor.stage_module import TORCH_DTYPES
from trainwright_worker.layers.layer import FamilyLayers, Layer, to_device
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.measure.attention_kernels import attention_kernels

ROWS = 4
FEW_ROWS, MANY_ROWS = 2, 6
LARGEST_ERROR = {Dtype.FLOAT32: 1e-3, Dtype.FLOAT16: 0.02, Dtype.BFLOAT16: 0.02}
"""Least limit of a gradient's error; a half format's limit is twice the CPU's own error in it, where that is more."""
KEPT_TOLERANCE = 0.05
LOSS_SCALE = 128.0
"""Factor that keeps the small float16 gradients of a mean above zero, and larger ones below infinity."""


def families(*, small: bool) -> tuple[Family, ...]:
    """Return one model of each family; the head width is that of real models unless sizes are tiny."""
    width, tokens, words, picture = (32, 12, 50, 32) if small else (256, 128, 1021, 64)  # rows of 1,021 are not aligned
    inner = 2 * width
    image, window = (32, 4) if small else (56, 7)  # the window of real models, whose strides need padding
    return (
        Gpt(2, width, 4, tokens, words),
        Llama(2, width, 4, tokens, words, intermediate_size=inner, key_value_heads=2),
        Llama(2, width, 4, tokens, words, inner, 2, attention_window=tokens // 4, full_attention_every=2),
        Bert(2, width, 4, tokens, words, intermediate_size=inner),
        T5(2, width, 4, tokens, words, decoder_sequence_length=tokens // 2, intermediate_size=inner),
        Moe(2, width, 4, tokens, words, experts=4, expert_every=2, intermediate_size=inner, key_value_heads=2),
        Vit(2, width, 4, picture, 8, classes=10),
        Swin((2, 1), width, (4, 8), image_size=image, patch_size=2, window_size=window, classes=10),
        WideResnet(50, 2, "both", 4 if small else 32, 64, classes=10),
        TransGan((1, 1, 0, 1), 2 * width, 2, 4, 16, window_size=8),
    )


def _named(family: Family) -> str:
    has_windows = isinstance(family, Llama) and family.attention_window is not None
    return f"{family.family} with windows" if has_windows else family.family


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield every family in each format that the device computes natively, then those of attention as on older GPUs."""
    for family in families(small=hardware.small):
        for dtype in dict.fromkeys((hardware.half, Dtype.FLOAT16, Dtype.FLOAT32)):
            yield Subject(f"{_named(family)}, {dtype}", partial(findings_of_family, hardware, family, dtype))
    if hardware.is_gpu:
        for family in families(small=hardware.small):
            if family.family in {"gpt", "llama", "moe", "t5"}:
                name = f"{_named(family)}, float16 before Ampere"
                yield Subject(name, partial(_findings_before_ampere, hardware, family, name))


def _findings_before_ampere(hardware: Hardware, family: Family, name: str) -> Iterator[Finding]:
    with kernels_before_ampere():
        yield from findings_of_family(hardware, family, Dtype.FLOAT16, name)


def findings_of_family(hardware: Hardware, family: Family, dtype: Dtype, name: str = "") -> Iterator[Finding]:
    """Yield gradients, kept bytes and, if the family has any, the attention kernels."""
    model = Model.of(family, dtype)
    original, layers = made(Model.of(family)), make_family_layers(model)
    own = _copied(original, dtype, hardware.device)
    subject = name or f"{_named(family)}, {dtype}"
    yield _gradients(f"{subject}: gradients", hardware, layers, model, original)
    yield from _kept_bytes(f"{subject}: kept bytes", hardware, layers, model, own)
    if kernels := attention_kernels(lambda: run(own, _rows(layers, own, ROWS, hardware.device, dtype))):
        yield _attention(f"{subject}: attention", hardware, kernels)


def _copied(layers: list[Layer], dtype: Dtype, device: torch.device, *, compute: Dtype | None = None) -> list[Layer]:
    """Return copies of all layers, tied weights included, rounded to a format and, if given, computed in another."""
    copies = copy.deepcopy(layers)
    for layer in copies:
        layer.to(device)
    for parameter in {id(one): one for layer in copies for one in layer.parameters()}.values():
        parameter.data = parameter.data.to(TORCH_DTYPES[dtype]).to(TORCH_DTYPES[compute or dtype])
    return copies


def _rows(
    family: FamilyLayers, layers: list[Layer], count: int, device: torch.device, dtype: Dtype
) -> dict[str, Tensor]:
    fields = tuple(dict.fromkeys(field for layer in layers for field in layer.reads))
    rows = family.rows(fields, seed=1, iteration=0, first=0, count=count)
    return to_device(rows, device, TORCH_DTYPES[dtype])


def _gradients(subject: str, hardware: Hardware, family: FamilyLayers, model: Model, original: list[Layer]) -> Finding:
    """Compare each kind of layer, given equal weights, inputs and gradients of its outputs."""
    cpu, dtype = torch.device("cpu"), model.dtype
    reference = _copied(original, dtype, cpu, compute=Dtype.FLOAT32)
    copies = [(_copied(original, dtype, device), device) for device in (hardware.device, cpu)]
    error, limit, where = 0.0, LARGEST_ERROR[dtype], "–"
    for kind in model.kinds:
        index = model.layers.index(kind.name)
        expected = _gradients_of(family, reference[index], index, (dtype, Dtype.FLOAT32), cpu)
        (own, name), (rounding, _) = (
            _largest_error(_gradients_of(family, copied[index], index, (dtype, dtype), device), expected)
            for copied, device in copies
        )
        if dtype is not Dtype.FLOAT32:
            limit = max(limit, 2 * rounding)
        if not own <= error:
            error, where = own, f"{kind.name}.{name}"
    return judged(subject, f"{error:.2g} of the CPU's in float32 ({where})", f"below {limit:.2g}", holds=error < limit)


def _gradients_of(
    family: FamilyLayers, layer: Layer, index: int, dtypes: tuple[Dtype, Dtype], device: torch.device
) -> dict[str, Tensor]:
    """Return the gradients of one layer's weights and inputs, which are rounded to the first format.

    It computes in the second one.
    """
    rounded, dtype = dtypes
    generator = torch.Generator().manual_seed(index)

    def draw(place: int) -> tuple[Tensor, ...]:
        shapes = family.boundary(place) if place >= 0 else ()
        drawn = (torch.randn(ROWS, *shape, generator=generator) for shape in shapes)
        return tuple(value.to(TORCH_DTYPES[rounded]).to(device, TORCH_DTYPES[dtype]) for value in drawn)

    layer.zero_grad()  # another layer may share its weights
    boundary = tuple(value.requires_grad_() for value in draw(index - 1))
    output = layer(boundary, _rows(family, [layer], ROWS, device, dtype))
    factor = LOSS_SCALE if dtype is Dtype.FLOAT16 and output.loss is not None else 1.0
    output.backward(tuple(factor * gradient for gradient in draw(index)), factor)
    inputs = {f"input {number}": value for number, value in enumerate(boundary)}
    return {
        name: value.grad.float().cpu() / factor
        for name, value in {**dict(layer.named_parameters()), **inputs}.items()
        if value.grad is not None
    }


def _largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest root mean square error over that of its tensor's gradient, and the tensor.

    Some gradients are zero but for rounding (a key bias) and count as a hundredth of the largest.
    """
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients are missing: {sorted(found.keys() ^ expected.keys())}")
    sizes = {name: value.square().mean().sqrt() for name, value in expected.items()}
    least = 0.01 * max(sizes.values())
    errors = {
        name: float((value - expected[name]).square().mean().sqrt() / sizes[name].clamp_min(least))
        for name, value in found.items()
    }
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return errors[worst], worst


def _kept_bytes(
    subject: str, hardware: Hardware, family: FamilyLayers, model: Model, layers: list[Layer]
) -> Iterator[Finding]:
    """Compare what each kind of layer keeps for one more row with the planner's count."""
    ratios = {}
    for kind in model.kinds:
        index = model.layers.index(kind.name)
        few, many = (
            _kept(layers[index], family, index, rows, (hardware.device, model.dtype)) for rows in (FEW_ROWS, MANY_ROWS)
        )
        counted = kind.saved_bytes_per_row(model.dtype) + beside(model.family, kind.name)
        ratios[kind.name] = ((many - few) / (MANY_ROWS - FEW_ROWS) - counted) / max(counted, 1)
    measured = ", ".join(f"{name} {ratio:+.1%}" for name, ratio in ratios.items() if abs(ratio) > KEPT_TOLERANCE / 10)
    measured = measured or "equal for all kinds of layers"
    expected = f"the planner's count within {KEPT_TOLERANCE:.0%}"
    if hardware.is_gpu:
        worst = max(map(abs, ratios.values()))
        yield judged(subject, measured, expected, holds=worst <= KEPT_TOLERANCE)
    else:
        yield skipped(subject, "some of a CPU's kernels keep other tensors", measured, expected)


def _kept(layer: Layer, family: FamilyLayers, index: int, rows: int, place: tuple[torch.device, Dtype]) -> int:
    device, dtype = place
    shapes = family.boundary(index - 1) if index else ()
    boundary = tuple(
        torch.randn(rows, *shape, device=device, dtype=TORCH_DTYPES[dtype], requires_grad=True) for shape in shapes
    )
    return kept(layer, boundary, _rows(family, [layer], rows, device, dtype))


def _attention(subject: str, hardware: Hardware, kernels: tuple[str, ...]) -> Finding:
    """Judge the attention kernels: the one named math stores all scores, which the planner does not count."""
    expected = "not math, which stores all scores"
    if not hardware.is_gpu:
        return skipped(subject, "a CPU has kernels of its own", ", ".join(kernels), expected)
    return judged(subject, ", ".join(kernels), expected, holds=STORES_SCORES not in kernels)
