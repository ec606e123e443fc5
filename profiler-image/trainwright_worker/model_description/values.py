"""Check of a user model's layers by their values, within a budget of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import torch
from torch import Tensor

from trainwright.families import CustomKind
from trainwright.quantity import format_bytes
from trainwright_worker.layers.custom import CustomLayers
from trainwright_worker.layers.custom_checks import check_rows
from trainwright_worker.layers.custom_errors import lacks_format, needs_gpu
from trainwright_worker.layers.layer import dtype_name
from trainwright_worker.model_description.formats import (
    CAST,
    refuse_tensors_left_behind,
)
from trainwright_worker.model_description.layer_runs import Findings, LayerRuns, relative_difference

_HALF_TOLERANCE: Final = 0.05
_CHECKED_ROWS: Final = 4
MAX_BYTES: Final = 8 * 2**30
_PASSES: Final = 8
"""Forwards' worth of products that a check takes of every row, backwards counted as two."""
_HALF_FLOPS: Final = {torch.bfloat16: 1e10, torch.float16: 5e7}
"""FLOPs above which a forward in a half format takes the CPU too long."""


class ValueCheck:
    """Check of the layers of one model within a budget."""

    def __init__(
        self,
        layers: CustomLayers,
        kinds: Sequence[CustomKind],
        seconds: float,
        dtypes: Sequence[torch.dtype],
        findings: Findings,
    ) -> None:
        self._layers, self._kinds, self.findings = layers, kinds, findings
        self._halves = [dtype for dtype in dtypes if dtype is not torch.float32]
        self._seconds, self._start = seconds, _computed_seconds()
        self._rate = _flops_per_second() if seconds > 0 else 1.0

    def run(self, keys: Sequence[Hashable], report: Callable[[int, int], None]) -> None:
        """Check one layer of each key, in order, on what the one before it handed on. Raises ValueError for what differs.

        `report` is called with the number of keys that are checked, and with that of all.
        """
        self._check_fields()
        outputs_of: dict[Hashable, list[Tensor] | None] = {}
        boundary: list[Tensor] | None = None
        for number, key in enumerate(keys):
            if key not in outputs_of:
                outputs_of[key] = self._check(number, boundary)
                report(len(outputs_of), len(set(keys)))
            boundary = outputs_of[key]

    def _check(self, number: int, boundary: list[Tensor] | None) -> list[Tensor] | None:
        """Return what the layer hands on; None if it was left out."""
        name = f"{self._kinds[number].name} (layer {number})"
        reason = self._obstacle(number, boundary)
        if reason is None:
            layer = LayerRuns(self._layers, number, boundary)
            try:
                results = layer.check(self.findings, scales_loss=torch.float16 in self._halves)
                self._check_halves(number, layer, results)
                refuse_tensors_left_behind(self._layers, layer.layer, [*layer.boundary, *layer.data.values()])
            except (RuntimeError, AssertionError) as error:
                if "allocate memory" in str(error):
                    reason = "the memory here is too small"
                elif needs_gpu(error) or lacks_format(error):
                    reason = "the CPU has no kernels for it"
                else:
                    raise layer.failure(error) from error
            else:
                return None if number == len(self._kinds) - 1 else results
        self.findings.left_out.append(f"values of {name}: {reason}")
        return None

    def _obstacle(self, number: int, boundary: list[Tensor] | None) -> str | None:
        """Return why a layer's values are not computed; None if they are."""
        formats = self._layers.formats(number - 1)
        if boundary is None and not all(dtype.is_floating_point for dtype in formats):
            return "it takes integers of a layer whose values were left out"
        kind, rows = self._kinds[number], self._layers.probed_rows
        kept = 4 * kind.saved_elements_per_row + kind.saved_bytes_per_row
        needed = 16 * kind.parameters + 3 * rows * kept + self._layers.makers.whole_bytes()
        if needed > MAX_BYTES:
            return f"they take about {format_bytes(round(needed))}, more than {format_bytes(MAX_BYTES)}"
        left = self._seconds_left
        if left <= 0 or _PASSES * rows * kind.forward_flops_per_row / self._rate > left:
            return "the time for checks is over (--check-seconds)"
        return None

    @property
    def _seconds_left(self) -> float:
        return self._seconds - (_computed_seconds() - self._start)

    def _check_fields(self) -> None:
        """Refuse rows that depend on each other and fields that half formats make infinite; remark on rounded whole numbers."""
        layers = self._layers
        check_rows(layers, layers.fields(0, _CHECKED_ROWS), range(_CHECKED_ROWS))
        for name, value in layers.fields(0, layers.probed_rows).items():
            for dtype in self._halves:
                if not value.is_floating_point() or name in layers.model.keep_float32:
                    continue
                rounded = value.to(dtype).to(value.dtype)
                words = dtype_name(dtype)
                if bool((value.isfinite() & ~rounded.isfinite()).any()):
                    largest = float(value[value.isfinite()].abs().max())
                    raise layers.error(
                        f"field {name!r} of rows() holds {largest:g}, which is infinite in {words}; give CustomModel "
                        f"keep_float32=[{name!r}], integers, or smaller numbers"
                    )
                if _rounds_whole_numbers(value, rounded):
                    place = int((value != rounded).flatten().int().argmax())
                    self.findings.remarks.append(
                        f"field {name!r} of rows() holds whole numbers that {words} rounds ({value.flatten()[place]:g} "
                        f"becomes {rounded.flatten()[place]:g}); give integers to keep them, or keep_float32=[{name!r}]"
                    )

    def _check_halves(self, number: int, layer: LayerRuns, results: list[Tensor]) -> None:
        if layer.batch_norm() is not None:
            return  # the CPU lacks that of half formats, which GPUs have
        flops = self._layers.probed_rows * self._kinds[number].forward_flops_per_row
        for dtype in self._halves:
            words = dtype_name(dtype)
            if flops > _HALF_FLOPS[dtype] or self._seconds_left <= 0:
                continue
            try:
                values = layer.forward_in(dtype)
            except RuntimeError as error:
                if lacks_format(error):
                    continue  # deliberate: GPUs have the kernels that the CPU lacks
                raise self._layers.error(
                    f"{layer.layer.label} fails in {words}: {type(error).__name__}: {' '.join(str(error).split())}; {CAST}"
                ) from error
            pairs = list(zip(values, results, strict=True))
            if number == len(self._kinds) - 1 and any(
                bool((other.isfinite() & ~value.isfinite()).any()) for value, other in pairs
            ):
                raise self._layers.error(
                    f"{layer.layer.label} gives a loss that is not finite in {words}; compute it in float32 (logits.float())"
                )
            difference = relative_difference(values, results)
            if difference > _HALF_TOLERANCE:
                self.findings.remarks.append(f"{layer.layer.label} in {words} differs from float32 by {difference:.0%}")


def _rounds_whole_numbers(value: Tensor, rounded: Tensor) -> bool:
    return bool((value == value.round()).all()) and bool((value != rounded).any())


def _computed_seconds() -> float:
    """Return the seconds of computation so far on as many cores as torch uses: others on the machine do not shorten a check."""
    return time.process_time() / torch.get_num_threads()


def _flops_per_second() -> float:
    matrix = torch.ones(512, 512)
    matrix @ matrix
    start = _computed_seconds()
    matrix @ matrix
    return float(2 * 512**3 / max(_computed_seconds() - start, 1e-4))
