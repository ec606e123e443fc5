"""Check of a user model's layers by their values, within a budget of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from trainwright.families import CustomKind
from trainwright.quantity import format_bytes
from trainwright_worker.layers.custom import CustomLayers, made_on
from trainwright_worker.layers.custom_boundaries import example_inputs
from trainwright_worker.layers.custom_checks import check_rows
from trainwright_worker.layers.custom_errors import ModelError, lacks_format, needs_gpu, shorten
from trainwright_worker.layers.layer import dtype_name
from trainwright_worker.model_description.check_budget import CheckBudget, TimeOverError
from trainwright_worker.model_description.formats import CAST, refuse_tensors_left_behind
from trainwright_worker.model_description.layer_runs import (
    HALF_TOLERANCE,
    Findings,
    LayerRuns,
    relative_difference,
)

_CHECKED_ROWS: Final = 4
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
        budget: CheckBudget,
        dtypes: Sequence[torch.dtype],
        findings: Findings,
    ) -> None:
        self._layers, self._kinds, self._budget, self.findings = layers, kinds, budget, findings
        self._halves = [dtype for dtype in dtypes if dtype is not torch.float32]
        self._rate = self._flops_per_second() if budget.seconds > 0 else 1.0

    def run(self, keys: Mapping[int, Hashable], report: Callable[[int, int], None] = lambda done, total: None) -> None:  # noqa: ARG005
        """Check one layer of each key, by layer and in order, on what the one before it handed on.

        `report` is called with the number of keys that are checked, and with that of all. Raises ValueError for what differs.
        """
        self._check_fields()
        outputs_of: dict[Hashable, list[Tensor] | None] = {}
        for number, key in keys.items():
            if key not in outputs_of:
                outputs_of[key] = self._check(number, outputs_of.get(keys.get(number - 1)))
                report(len(outputs_of), len(set(keys.values())))
        self._layers.makers.forget()

    def _check(self, number: int, boundary: list[Tensor] | None) -> list[Tensor] | None:
        """Return what the layer hands on; None if it was left out."""
        reason = self._obstacle(number, boundary)
        name = f"{self._kinds[number].name} (layer {number})"
        if reason is None:
            try:
                results = self._check_values(number, boundary)
            except ModelError:
                raise
            except TimeOverError:
                reason = self._time_is_over
            except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
                reason = self._reason_of(number, error)
            else:
                return None if number == len(self._kinds) - 1 else results
        self.findings.left_out.append(f"values of {name}: {reason}")
        self.findings.unchecked_kinds.add(self._kinds[number].name)
        return None

    def _check_values(self, number: int, boundary: list[Tensor] | None) -> list[Tensor]:
        layer = LayerRuns(self._layers, number, boundary, self._budget)
        scales_loss = torch.float16 in self._halves
        with _full_float32():
            try:
                results = layer.check(self.findings, scales_loss=scales_loss)
            except ModelError:
                raise
            except RuntimeError:
                half = self._only_format(layer)
                if half is None:
                    raise
                return half.check(self.findings, scales_loss=scales_loss)
            self._check_halves(number, layer, results)
        refuse_tensors_left_behind(self._layers, layer.layer, [*layer.boundary, *layer.data.values()])
        return results

    def _only_format(self, layer: LayerRuns) -> LayerRuns | None:
        """Return the layer in the half format of the plan where it has kernels in that alone, as attention for GPUs may."""
        if not (self._budget.is_trained_here and self._halves):
            return None
        half = LayerRuns(self._layers, layer.number, layer.boundary, self._budget, self._halves[0])
        try:
            half.compute(range(half.rows))
        except RuntimeError:
            return None
        return half

    def _reason_of(self, number: int, error: Exception) -> str:
        """Return why a layer's values were left out after this failure. Raises ValueError if it is the user's."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
            return "the memory here is too small"
        lacks_kernels = self._budget.device.type == "cpu" and (needs_gpu(error) or lacks_format(error))
        if lacks_kernels and not self._budget.is_trained_here:
            return "the CPU has no kernels for it"
        with made_on(self._layers, number, "meta") as layer:
            if lacks_kernels:
                raise self._layers.error(
                    f"{layer.label} has no kernels for a CPU, on which it is to be measured ({shorten(error)}); plan it "
                    "on GPUs alone"
                ) from error
            boundary, data = example_inputs(self._layers, layer, self._layers.probed_rows, torch.float32)
            raise self._layers.failure(layer, [*boundary, *data.values()], error) from error

    def _obstacle(self, number: int, boundary: list[Tensor] | None) -> str | None:
        """Return why a layer's values are not computed; None if they are."""
        formats, budget = self._layers.formats(number - 1), self._budget
        if boundary is None and not (budget.is_trained_here or all(dtype.is_floating_point for dtype in formats)):
            return "it takes integers of a layer whose values were left out"
        kind, rows = self._kinds[number], self._layers.probed_rows
        kept = 4 * kind.saved_elements_per_row + kind.saved_bytes_per_row
        needed = 16 * kind.parameters + 3 * rows * kept
        if budget.device.type == "cpu":
            needed += self._layers.makers.whole_bytes()
        if needed > budget.max_bytes:
            return f"they take about {format_bytes(round(needed))}, more than {format_bytes(round(budget.max_bytes))}"
        left = self._budget.seconds_left
        if left <= 0 or _PASSES * rows * kind.forward_flops_per_row / self._rate > left:
            return self._time_is_over
        return None

    @property
    def _time_is_over(self) -> str:
        budget = self._budget
        way = f"{budget.seconds:g} s" if budget.is_trained_here else "--check-seconds"
        return f"the time for checks is over ({way})"

    def _flops_per_second(self) -> float:
        matrix = torch.ones(512, 512, device=self._budget.device)
        matrix @ matrix
        start = self._budget.clock()
        matrix @ matrix
        return float(2 * 512**3 / max(self._budget.clock() - start, 1e-4))

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
            is_slow = self._budget.device.type == "cpu" and flops > _HALF_FLOPS[dtype]
            if is_slow or self._budget.seconds_left <= 0:
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
            if difference > HALF_TOLERANCE:
                self.findings.remarks.append(f"{layer.layer.label} in {words} differs from float32 by {difference:.0%}")


def _rounds_whole_numbers(value: Tensor, rounded: Tensor) -> bool:
    return bool((value == value.round()).all()) and bool((value != rounded).any())


@contextmanager
def _full_float32() -> Iterator[None]:
    """Compute products of float32 in float32: GPUs round them to fewer bits where that is allowed."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
