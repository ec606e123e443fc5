"""Description of a user model for the planner, counted from its layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from trainwright.families import Custom, CustomChecks, CustomKind
from trainwright.quantity import format_bytes
from trainwright_worker.layers.custom import (
    CustomLayers,
    custom_layers,
    is_without_backward,
    made_on,
)
from trainwright_worker.layers.described_layers import output_sizes, shared_weight_of
from trainwright_worker.layers.layer import dtype_name
from trainwright_worker.model_description.check_budget import CheckBudget
from trainwright_worker.model_description.fingerprint import check_other_process, other_process
from trainwright_worker.model_description.formats import FORMATS, check_formats
from trainwright_worker.model_description.layer_key import boundary_key, layer_key
from trainwright_worker.model_description.layer_runs import Findings
from trainwright_worker.model_description.passes import count_passes
from trainwright_worker.model_description.values import ValueCheck

CHECK_SECONDS = 120.0
"""Time that the checks of values may take by default."""

MAX_BYTES = 8 * 2**30
"""Memory that the checks of values may take."""


def _float32_outputs(layers: CustomLayers, layer: int, half: torch.dtype | None) -> int:
    """Return the floats per row after a layer that stay float32 in a half format; 0 if the model is trained in none."""
    if half is None:
        return 0
    sized = zip(map(prod, layers.boundary(layer)), layers.formats(layer, half), strict=True)
    return sum(size for size, dtype in sized if dtype is torch.float32)


def describe(
    entrypoint: str,
    check_seconds: float = CHECK_SECONDS,
    dtypes: Sequence[torch.dtype] = FORMATS,
    report: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005 - nobody asks for progress
) -> Custom:
    """Count what the planner needs to know of an entry point's model, by running each layer separately, and check it.

    Layers with the same class, sizes and counts are of one kind. Layers run on torch's meta device, which computes nothing,
    unless they need values; within `check_seconds` one of each kind also computes a few rows on the CPU, and `report` is
    called with the kinds that are checked and their number. Raises ValueError that states what to change in the model.
    """
    layers = custom_layers(entrypoint)
    kinds: dict[Hashable, CustomKind] = {}
    kind_of: dict[Hashable, CustomKind] = {}
    findings = Findings()
    half = next((dtype for dtype in dtypes if dtype is not torch.float32), None)
    keys = [layer_key(layers, number, half) for number in range(len(layers))]
    of_keys = [keys.index(key) for key in dict.fromkeys(keys)]
    for number in of_keys:
        counted = _count_kind(layers, number, half)
        if (left_out := check_formats(layers, number, dtypes)) is not None:
            findings.left_out.append(left_out)
        named = _with_free_name(counted.kind, [kind.name for kind in kinds.values()])
        kind_of[keys[number]] = kinds.setdefault(counted.key, named)
    of_layers = [kind_of[key] for key in keys]
    whole_bytes = layers.makers.whole_bytes()
    if whole_bytes > MAX_BYTES:
        findings.left_out.append(
            f"weights and rows of another process: the whole model takes {format_bytes(whole_bytes)}"
        )
    starts_other = check_seconds > 0 and whole_bytes <= MAX_BYTES
    with other_process(entrypoint, of_keys) if starts_other else nullcontext() as other:
        if check_seconds > 0:
            budget = CheckBudget(check_seconds, MAX_BYTES)
            ValueCheck(layers, of_layers, budget, dtypes, findings).run(dict(enumerate(keys)), report)
        else:
            findings.left_out.append("values of all layers: no time was given for checks (--check-seconds)")
            findings.unchecked_kinds.update(kind.name for kind in of_layers)
        if other is not None and (left_out := check_other_process(layers, of_keys, other)) is not None:
            findings.left_out.append(left_out)
    if missing := [dtype_name(dtype) for dtype in FORMATS if dtype not in dtypes]:
        findings.left_out.insert(0, f"{' and '.join(missing)}, so train it in another format (dtype)")
    unchecked = tuple(kind.name for kind in kinds.values() if kind.name in findings.unchecked_kinds)
    checks = CustomChecks(tuple(findings.left_out), tuple(findings.remarks), findings.zero_loss, unchecked)
    return Custom(
        entrypoint,
        tuple(kinds.values()),
        tuple(kind.name for kind in of_layers),
        min_rows=layers.model.min_rows,
        whole_batch=layers.model.whole_batch,
        keep_float32=tuple(layers.model.keep_float32),
        checks=checks,
    )


def _with_free_name(kind: CustomKind, taken: list[str]) -> CustomKind:
    """Return the kind under its class name, with a number appended if that is taken."""
    names = (kind.name, *(f"{kind.name}{number}" for number in range(2, len(taken) + 2)))
    return replace(kind, name=next(name for name in names if name not in taken))


class _Counted(NamedTuple):
    """Kind of a layer under its class name, and what identifies the kind."""

    kind: CustomKind
    key: Hashable


def _count_kind(layers: CustomLayers, number: int, half: torch.dtype | None) -> _Counted:
    counts = count_passes(layers, number)
    elements, integer_bytes = output_sizes(layers, number)
    shared_weight, shared_parameters = shared_weight_of(layers, number)
    with made_on(layers, number, "meta") as layer:
        kind = CustomKind(
            name=layer.class_name,
            parameters=layers.parameters[number],
            forward_flops_per_row=counts.forward_flops,
            output_elements_per_row=elements,
            output_bytes_per_row=integer_bytes,
            output_float32_elements_per_row=_float32_outputs(layers, number, half),
            saved_elements_per_row=counts.saved_elements,
            saved_bytes_per_row=counts.saved_bytes,
            half_saved_bytes_per_row=0.0 if half is None else counts.half_saved_bytes,
            passed_elements_per_row=counts.passed_elements,
            workspace_bytes_per_row=counts.workspace_bytes,
            buffer_bytes=sum(buffer.nbytes for buffer in layer.buffers()),
            changed_buffer_bytes=counts.changed_buffer_bytes,
            forward_kernels=counts.forward_kernels,
            backward_kernels=counts.backward_kernels,
            forward_moved_elements_per_row=counts.traffic.forward_elements,
            forward_moved_bytes_per_row=counts.traffic.forward_bytes,
            backward_moved_elements_per_row=counts.traffic.backward_elements,
            backward_moved_bytes_per_row=counts.traffic.backward_bytes,
            shared_weight=shared_weight,
            shared_parameters=shared_parameters,
            frozen_parameters=layers.frozen[number],
            without_backward=is_without_backward(layers, number),
            products=counts.products,
        )
        return _Counted(kind, (repr(layer.module), boundary_key(layers, number, half), layer.reads, kind))
