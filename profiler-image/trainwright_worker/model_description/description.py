"""Description of a user model for the planner, counted from its layers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainwright.families import Custom, CustomChecks, CustomKind
from trainwright.quantity import format_bytes
from trainwright_worker.fused_attention import FusedAttention
from trainwright_worker.layers.custom import (
    CustomLayer,
    CustomLayers,
    custom_layers,
    is_without_backward,
    made_on,
)
from trainwright_worker.layers.custom_boundaries import example_inputs
from trainwright_worker.layers.custom_constants import constants
from trainwright_worker.layers.described_layers import output_sizes, shared_weight_of
from trainwright_worker.layers.layer import dtype_name
from trainwright_worker.model_description.fingerprint import SECONDS, digests, first_difference, other_process
from trainwright_worker.model_description.formats import FORMATS, check_formats, in_format
from trainwright_worker.model_description.layer_runs import Findings
from trainwright_worker.model_description.passes import buffer_bytes, changed_buffer_bytes, count_passes, storage_id
from trainwright_worker.model_description.values import MAX_BYTES, ValueCheck

CHECK_SECONDS = 120.0
"""Time that the checks of values may take by default."""

_FEWER_ROWS = 2
"""Rows of the first of two runs of a layer, the second has twice as many; their common part does not depend on rows."""


def _float32_outputs(layers: CustomLayers, layer: int, half: torch.dtype | None) -> int:
    """Return the floats per row after a layer that stay float32 in a half format; 0 if the model is trained in none."""
    if half is None:
        return 0
    sized = zip(map(prod, layers.boundary(layer)), layers.formats(layer, half), strict=True)
    return sum(size for size, dtype in sized if dtype is torch.float32)


def describe(entrypoint: str, check_seconds: float = CHECK_SECONDS, dtypes: Sequence[torch.dtype] = FORMATS) -> Custom:
    """Count what the planner needs to know of an entry point's model, by running each layer separately, and check it.

    Layers with the same class, sizes and counts are of one kind. Layers run on torch's meta device, which computes nothing,
    unless they need values; within `check_seconds` one of each kind also computes a few rows on the CPU. Raises ValueError
    that states what to change in the model.
    """
    layers = custom_layers(entrypoint)
    kinds: dict[Hashable, CustomKind] = {}
    counted: dict[Hashable, _Counted] = {}
    of_layers, keys = [], []
    findings = Findings()
    half = next((dtype for dtype in dtypes if dtype is not torch.float32), None)
    for number in range(len(layers)):
        key = _key(layers, number, half)
        if key not in counted:
            counted[key] = _count_kind(layers, number, half)
            if (left_out := check_formats(layers, number, dtypes)) is not None:
                findings.left_out.append(left_out)
        name = _with_free_name(counted[key].kind, [kind.name for kind in kinds.values()])
        of_layers.append(kinds.setdefault(counted[key].key, name))
        keys.append(key)
    of_keys = [keys.index(key) for key in dict.fromkeys(keys)]
    whole_bytes = layers.makers.whole_bytes()
    if whole_bytes > MAX_BYTES:
        findings.left_out.append(
            f"weights and rows of another process: the whole model takes {format_bytes(whole_bytes)}"
        )
    starts_other = check_seconds > 0 and whole_bytes <= MAX_BYTES
    with other_process(entrypoint, of_keys) if starts_other else nullcontext() as other:
        if check_seconds > 0:
            ValueCheck(layers, of_layers, check_seconds, dtypes, findings).run(keys)
        else:
            findings.left_out.append("values of all layers: no time was given for checks (--check-seconds)")
        if other is not None:
            _check_other_process(layers, of_keys, other, findings)
    if missing := [dtype_name(dtype) for dtype in FORMATS if dtype not in dtypes]:
        findings.left_out.insert(0, f"{' and '.join(missing)}, so train it in another format (dtype)")
    checks = CustomChecks(tuple(findings.left_out), tuple(findings.remarks), findings.zero_loss)
    return Custom(
        entrypoint,
        tuple(kinds.values()),
        tuple(kind.name for kind in of_layers),
        min_rows=layers.model.min_rows,
        whole_batch=layers.model.whole_batch,
        keep_float32=tuple(layers.model.keep_float32),
        checks=checks,
    )


def _check_other_process(
    layers: CustomLayers, numbers: list[int], other: subprocess.Popen[str], findings: Findings
) -> None:
    """Check that a process with other hashes starts with the same weights and rows. Raises ValueError if it does not."""
    own = digests(layers.model, numbers)
    try:
        written, error_output = other.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        findings.left_out.append(f"weights and rows of another process: it took more than {SECONDS:.0f} s")
        return
    if other.returncode != 0:
        last = (error_output.strip().splitlines() or ["it wrote nothing"])[-1]
        raise layers.error(f"it cannot be made in another process: {last}; correct it")
    differs = first_difference(own, json.loads(written.strip().splitlines()[-1]))
    if differs is None:
        return
    kind, name, *_ = differs.split()
    if kind == "field":
        raise layers.error(
            f"field {name!r} of rows() has other values in another process for the same seed, iteration and rows (hash() "
            "of a text, numpy without a seed, or the time); make them from numbers alone"
        )
    label = layers.make_module(int(name)).label
    raise layers.error(
        f"{label} starts with other weights in another process for the same seed (numpy, Python's random, a "
        "hash or the time), so that replicas would differ; draw them from torch's default generator"
    )


def _with_free_name(kind: CustomKind, taken: list[str]) -> CustomKind:
    """Return the kind under its class name, with a number appended if that is taken."""
    names = (kind.name, *(f"{kind.name}{number}" for number in range(2, len(taken) + 2)))
    return replace(kind, name=next(name for name in names if name not in taken))


@dataclass(frozen=True, slots=True)
class _ForwardCounts:
    """Counts of a layer's forward in one format: values that it keeps in that, and bytes in others."""

    flops: float
    saved_elements: float
    saved_bytes: float

    def per_row(self, smaller: _ForwardCounts, rows: int) -> _ForwardCounts:
        """Return what each of `rows` further rows adds."""
        return _ForwardCounts(
            max((self.flops - smaller.flops) / rows, 0.0),
            max((self.saved_elements - smaller.saved_elements) / rows, 0.0),
            max((self.saved_bytes - smaller.saved_bytes) / rows, 0.0),
        )


class _Counted(NamedTuple):
    """Kind of a layer under its class name, and what identifies the kind."""

    kind: CustomKind
    key: Hashable


def _key(layers: CustomLayers, number: int, half: torch.dtype | None) -> Hashable:
    """Return what identifies layers that compute, share and train alike."""
    has_backward = not is_without_backward(layers, number)
    with made_on(layers, number, "meta") as layer:
        made = repr(layer.module), constants(layer.module)
    return *made, _boundaries(layers, number, half), layer.reads, layers.shared_weights.get(number), has_backward


def _boundaries(layers: CustomLayers, number: int, half: torch.dtype | None) -> Hashable:
    """Return shapes and formats of what a layer takes and hands on."""
    numbers = (number - 1, number) if number else (number,)
    dtypes = [torch.float32] if half is None else [torch.float32, half]
    return tuple(
        (layers.handed_on[layer], layers.boundary(layer), *(layers.formats(layer, dtype) for dtype in dtypes))
        for layer in numbers
    )


def _count_kind(layers: CustomLayers, number: int, half: torch.dtype | None) -> _Counted:
    device = "meta"
    try:
        layer, few, more = _count_forwards(layers, number, device)
    except RuntimeError:  # deliberate: a layer that needs values runs on the CPU
        device = "cpu"
        try:
            layer, few, more = _count_forwards(layers, number, device)
        except RuntimeError as error:
            with torch.device("meta"):
                arguments = layers.example(number - 1, _FEWER_ROWS)
            raise layers.failure(layers.make_module(number), arguments, error) from error
    without_backward = is_without_backward(layers, number)
    facts = more.per_row(few, _rows_apart(layers))
    half_bytes = 0.0 if half is None else _saved_in_halves(layers, number, device, half)
    if half_bytes == 2 * facts.saved_elements + facts.saved_bytes:
        half_bytes = 0.0
    if without_backward:
        facts, half_bytes = replace(facts, saved_elements=0.0, saved_bytes=0.0), 0.0
    elements, integer_bytes = output_sizes(layers, number)
    kept = torch.float32.itemsize * facts.saved_elements + facts.saved_bytes
    passes = count_passes(layers, number, device, kept)
    shared_weight, shared_parameters = shared_weight_of(layers, number)
    kind = CustomKind(
        name=layer.class_name,
        parameters=layers.parameters[number],
        forward_flops_per_row=facts.flops,
        output_elements_per_row=elements,
        output_bytes_per_row=integer_bytes,
        output_float32_elements_per_row=_float32_outputs(layers, number, half),
        saved_elements_per_row=facts.saved_elements,
        saved_bytes_per_row=facts.saved_bytes,
        half_saved_bytes_per_row=half_bytes,
        workspace_bytes_per_row=passes.workspace_bytes_per_row,
        buffer_bytes=buffer_bytes(layer),
        changed_buffer_bytes=changed_buffer_bytes(layers, number, device),
        forward_kernels=passes.forward_kernels,
        backward_kernels=passes.backward_kernels,
        forward_moved_elements_per_row=passes.traffic.forward_elements,
        forward_moved_bytes_per_row=passes.traffic.forward_bytes,
        backward_moved_elements_per_row=passes.traffic.backward_elements,
        backward_moved_bytes_per_row=passes.traffic.backward_bytes,
        shared_weight=shared_weight,
        shared_parameters=shared_parameters,
        frozen_parameters=layers.frozen[number],
        without_backward=without_backward,
    )
    return _Counted(kind, (repr(layer.module), _boundaries(layers, number, half), layer.reads, kind))


def _rows_apart(layers: CustomLayers) -> int:
    return max(layers.model.min_rows, _FEWER_ROWS)


def _count_forwards(
    layers: CustomLayers, number: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[CustomLayer, _ForwardCounts, _ForwardCounts]:
    fewer = _rows_apart(layers)
    with made_on(layers, number, device) as layer:
        in_format(layer, dtype)
        few, more = (_count_forward(layers, layer, rows, dtype) for rows in (fewer, 2 * fewer))
    return layer, few, more


def _saved_in_halves(layers: CustomLayers, number: int, device: str, half: torch.dtype) -> float:
    """Return the bytes per row that a layer keeps in a half format, float32 among them; 0 if it fails in that."""
    try:
        _, few, more = _count_forwards(layers, number, device, half)
    except RuntimeError:  # deliberate: what no device computes is refused by the check of formats
        return 0.0
    facts = more.per_row(few, _rows_apart(layers))
    return half.itemsize * facts.saved_elements + facts.saved_bytes


def _count_forward(layers: CustomLayers, layer: CustomLayer, rows: int, dtype: torch.dtype) -> _ForwardCounts:
    boundary, data = example_inputs(layers, layer, rows, dtype)
    weights = {storage_id(parameter) for parameter in layer.parameters()}
    stored = {storage_id(value): value for value in (*boundary, *data.values())}

    def store(saved: Tensor) -> Tensor:
        if storage_id(saved) not in weights:
            stored[storage_id(saved)] = saved  # keep it alive: addresses identify storages only while all of them live
        return saved

    with (
        FusedAttention(),
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(store, lambda saved: saved),
    ):
        output = layer(boundary, data)
    del output
    elements = sum(_storage_numel(value) for value in stored.values() if value.dtype is dtype)
    others = sum(value.untyped_storage().nbytes() for value in stored.values() if value.dtype is not dtype)
    return _ForwardCounts(float(counter.get_total_flops()), float(elements), float(others))


def _storage_numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()
