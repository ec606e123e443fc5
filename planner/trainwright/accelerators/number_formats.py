"""Number formats that accelerators compute natively, and those that are worth a search on a pool of accelerators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from typing import Final

from trainwright.accelerators.data_sheets import data_sheet, has_data_sheet
from trainwright.accelerators.roofline import estimate_kind
from trainwright.cluster import EMULATED_PREFIX, is_cpu
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Runtime
from trainwright.training import Optimizer

PREFERRED: Final = (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32)
"""Formats in the order in which equally fast ones are chosen: bfloat16 needs no loss scaling."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """Number format with the accelerators that compute it natively, and those that its plans leave out."""

    dtype: Dtype
    accelerators: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def is_native(accelerator: str, dtype: Dtype) -> bool:
    """Return whether an accelerator computes a format natively.

    CPUs compute in float32, and emulated ones on a CPU. One without a data sheet may have any format: its profiles decide.
    """
    if is_cpu(accelerator) or accelerator.startswith(EMULATED_PREFIX):
        return dtype is Dtype.FLOAT32
    return not has_data_sheet(accelerator) or dtype in data_sheet(accelerator).generation_sheet.formats.values


def emulating(accelerators: Iterable[str], dtype: Dtype) -> tuple[str, ...]:
    """Return the accelerators that do not compute a format natively, without those whose speed is emulated itself."""
    return tuple(name for name in accelerators if not name.startswith(EMULATED_PREFIX) and not is_native(name, dtype))


def format_choices(accelerators: Collection[str], among: Collection[Dtype] = PREFERRED) -> tuple[FormatChoice, ...]:
    """Return the formats that may give the fastest plan, each on the accelerators that compute it natively.

    `among` are the trainer's formats; float32 is one of them. Another format is left out where one computes on at least its
    accelerators, at least as fast by their data sheets, and with no more bytes: each of its plans is as fast in that format.
    """
    names = tuple(dict.fromkeys(accelerators))
    choices: list[FormatChoice] = []
    for dtype in (preferred for preferred in PREFERRED if preferred in among):
        native = tuple(name for name in names if is_native(name, dtype))
        if native:
            choices.append(FormatChoice(dtype, native, tuple(name for name in names if name not in native)))
    order = {choice: number for number, choice in enumerate(choices)}
    return tuple(
        choice
        for choice in choices
        if not any(
            _dominates(other, choice) and (order[other] < order[choice] or not _dominates(choice, other))
            for other in choices
            if other is not choice
        )
    )


def best_format(accelerators: Collection[str], among: Collection[Dtype] = PREFERRED) -> Dtype:
    """Return the fastest format that all these accelerators compute natively; of equally fast ones the preferred."""
    return next(choice.dtype for choice in format_choices(accelerators, among) if not choice.left_out)


def equally_fast(accelerators: Collection[str], dtype: Dtype, among: Collection[Dtype] = PREFERRED) -> Dtype:
    """Return the preferred one of the native formats with the rates and bytes of `dtype` on all these accelerators."""
    best, own = best_format(accelerators, among), tuple(accelerators)
    equal = _dominates(FormatChoice(best, own), FormatChoice(dtype, own))
    return best if equal and best.num_bytes == dtype.num_bytes else dtype


def _dominates(choice: FormatChoice, other: FormatChoice) -> bool:
    """Return whether all plans of the other format are as fast in this one, memory permitting."""
    if choice.dtype.num_bytes > other.dtype.num_bytes or not set(other.accelerators) <= set(choice.accelerators):
        return False
    return all(
        has_data_sheet(name)
        and data_sheet(name).flops_per_second(choice.dtype) >= data_sheet(name).flops_per_second(other.dtype)
        for name in other.accelerators
    )


def profiles_in(  # noqa: PLR0913 - what profiles depend on
    profiles: Profiles,
    model: Model,
    dtype: Dtype,
    *,
    optimizer: Optimizer = "adam",
    runtime: Runtime | None = None,
    power_watts: Mapping[str, float] | None = None,
) -> Profiles:
    """Return profiles of a model's layers scaled to another number format by the rooflines of the data sheets.

    `optimizer`, `runtime` and `power_watts` are those of `estimate_profiles`: its estimates, scaled, are its estimates in the
    other format. Raises ValueError for an accelerator without a data sheet.
    """
    names = {kind.name for kind in model.kinds}
    ordered = sorted((layer for layer in profiles.layers if layer.kind in names), key=_place)

    def scaled(layers: list[LayerProfile]) -> Iterator[LayerProfile]:
        accelerator, name, degree = _place(layers[0])
        rows, watts = [layer.rows for layer in layers], (power_watts or {}).get(accelerator)
        old, new = (
            estimate_kind(
                name,
                replace(model, dtype=each_dtype),
                accelerator,
                degree,
                rows,
                optimizer=optimizer,
                runtime=runtime,
                power_watts=watts,
            )
            for each_dtype in (model.dtype, dtype)
        )
        return map(partial(_scaled, bytes_ratio=Fraction(dtype.num_bytes, model.dtype.num_bytes)), layers, old, new)

    return replace(
        profiles, layers=tuple(profile for _, group in groupby(ordered, key=_place) for profile in scaled(list(group)))
    )


def _place(layer: LayerProfile) -> tuple[str, str, int]:
    return layer.accelerator, layer.kind, layer.tensor_degree


def _scaled(layer: LayerProfile, before: LayerProfile, after: LayerProfile, *, bytes_ratio: Fraction) -> LayerProfile:
    """Scale a profile by its estimates in both formats; an estimate itself becomes the other, to the last digit."""

    def seconds(measured: float, old: float, new: float) -> float:
        return new if measured == old else measured * (new / old)

    return replace(
        layer,
        forward_seconds=seconds(layer.forward_seconds, before.forward_seconds, after.forward_seconds),
        backward_seconds=seconds(layer.backward_seconds, before.backward_seconds, after.backward_seconds),
        update_seconds=seconds(layer.update_seconds, before.update_seconds, after.update_seconds),
        activation_bytes=round(layer.activation_bytes * after.activation_bytes / max(before.activation_bytes, 1)),
        parameter_bytes=int(layer.parameter_bytes * bytes_ratio),
        submission_seconds=None,
    )
