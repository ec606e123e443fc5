"""Rates that bound every plan, beside the data sheet: copies within memory, and one large matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from gpu_checks.findings import Finding, judged, skipped
from gpu_checks.hardware import Hardware
from gpu_checks.running import Subject
from trainwright.accelerators import DataSheet
from trainwright.accelerators.efficiency import MEMORY_RATIO

SIDE = 8192
COPIED_BYTES = 4 * 2**30
TOLERANCE = 0.3
"""Largest relative difference from what the planner assumes of a data sheet's rate."""


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield the copy and the product."""
    if hardware.sheet is None:
        reason = f"there is no data sheet of {hardware.name}"
        yield Subject("copy and matrix product", lambda: [skipped("copy and matrix product", reason)])
        return
    yield Subject("copy", partial(_copy, hardware, hardware.sheet))
    yield Subject(f"{hardware.half} matrix product", partial(_matmul, hardware, hardware.sheet))


def _copy(hardware: Hardware, sheet: DataSheet) -> Iterator[Finding]:
    elements = 2**16 if hardware.small else min(COPIED_BYTES, hardware.memory_bytes // 4) // 4
    source = torch.randn(elements, device=hardware.device)
    target = torch.empty_like(source)
    (seconds,) = hardware.seconds_of(lambda: target.copy_(source))
    moved = 2 * source.nbytes  # read and written
    yield _beside("copy", moved / seconds, sheet.memory_bytes_per_second.value, MEMORY_RATIO, "TB/s")


def _matmul(hardware: Hardware, sheet: DataSheet) -> Iterator[Finding]:
    side = 256 if hardware.small else SIDE
    left, right = (torch.randn(side, side, device=hardware.device, dtype=hardware.torch_half) for _ in range(2))
    (seconds,) = hardware.seconds_of(lambda: torch.mm(left, right))
    efficiency, peak = sheet.generation_sheet.efficiency, sheet.flops_per_second(hardware.half)
    within_power = efficiency.matrix_flops_per_joule * sheet.power_watts.value
    share = min(efficiency.matrix, within_power / peak)
    yield _beside(f"{hardware.half} matrix product, {side}³", 2 * side**3 / seconds, peak, share, "TFLOP/s")


def _beside(subject: str, rate: float, peak: float, share: float, unit: str) -> Finding:
    """Judge a rate by the share of the data sheet's that the planner assumes."""
    measured = f"{rate / 1e12:.3g} {unit}, {rate / peak:.2f} of the data sheet's {peak / 1e12:.3g}"
    holds = abs(rate / peak / share - 1) <= TOLERANCE and rate <= 1.05 * peak
    return judged(subject, measured, f"{share:.2f} within {TOLERANCE:.0%}, as the planner assumes", holds=holds)
