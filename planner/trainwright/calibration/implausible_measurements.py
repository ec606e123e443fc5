"""Measurements that cannot be right: too far from their predictions for any factor, or more memory than a device has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainwright.calibration.factors import MAX_RATIO, Evaluation
from trainwright.calibration.measured_trials import Trial
from trainwright.quantity import format_bytes

UNPREDICTED_BYTES: Final = 8 * 2**30
"""Memory besides MAX_RATIO times the prediction that a peak may have: a device's context, its libraries and the buffers of
its communicators, which dominate small models."""
MEMORY_SLACK: Final = 1.1
"""Ratio of a measured peak to the device's memory beyond which it is wrong: clusters may give 80e9 bytes for 80 GiB."""
SECONDS_MEANT: Final = "seconds, not milliseconds"
BYTES_MEANT: Final = "bytes, not KiB or MiB"


@dataclass(frozen=True, slots=True)
class Implausible:
    """Measured figure that cannot be right.

    Attributes:
        what: sentence without its end, which begins with the field.
        unit: the field's unit, and what it may have been mistaken for.
    """

    what: str
    unit: str

    @property
    def remedy(self) -> str:
        """Return what to change."""
        return f"check the unit ({self.unit}), or drop what was not measured right"


def implausible(evaluation: Evaluation, number: int) -> Implausible | None:
    """Return the first figure of a trial that cannot be right; None if all can, or none was measured.

    Of memory, a peak may be far above its prediction as long as it fits the device: a part of it is constant.
    """
    trial = evaluation.trials[number]
    if not isinstance(trial, Trial):
        return None
    measured, expected = trial.iteration_seconds, evaluation.seconds(number, evaluation.context.runtime)
    if not expected / MAX_RATIO <= measured <= expected * MAX_RATIO:
        words = _far_off("iteration_seconds", measured, expected, f"{expected:.4g}")
        return Implausible(f"{words}, too far for any factor to explain", SECONDS_MEANT)
    for peak in _peaks(evaluation, number, trial):
        if peak.measured > peak.limit * MEMORY_SLACK:
            size = format_bytes(peak.limit)
            return Implausible(f"{peak.field} is {peak.measured:,}, more than the {peak.device}'s {size}", BYTES_MEANT)
        if not peak.expected / MAX_RATIO <= peak.measured <= peak.expected * MAX_RATIO + UNPREDICTED_BYTES:
            words = _far_off(peak.field, peak.measured, peak.expected, f"{peak.expected:,}")
            return Implausible(f"{words}, too far for any factor to explain", BYTES_MEANT)
    return None


def refuse_implausible(evaluation: Evaluation) -> None:
    """Raise ValueError, naming the trials, for measured ones with a figure that cannot be right."""
    refused = {number: wrong for number in range(len(evaluation.trials)) if (wrong := implausible(evaluation, number))}
    if not refused:
        return
    first, wrong = next(iter(refused.items()))
    others = ", ".join(
        f"trials.{number}" for number, other in refused.items() if number > first and other.unit == wrong.unit
    )
    also = f"; so is that of {others}" if others else ""
    raise ValueError(f"trials.{first} ({evaluation.trials[first].label}): {wrong.what}{also}; {wrong.remedy}")


@dataclass(frozen=True, slots=True)
class _Peak:
    """Measured peak bytes, their prediction and the device's memory, with the names of field and device."""

    field: str
    device: str
    measured: int
    expected: int
    limit: int


def _peaks(evaluation: Evaluation, number: int, trial: Trial) -> Iterator[_Peak]:
    cluster = evaluation.context.cluster
    bytes_of_device = evaluation.memory(number, evaluation.context.runtime)
    for memory in trial.memory_by_device:
        limit = cluster.accelerator_of(memory.device).memory_bytes
        yield _Peak(
            f"peak_bytes of {memory.device}", "device", memory.peak_bytes, bytes_of_device[memory.device], limit
        )
    if trial.peak_memory_bytes is not None:
        limit = max(cluster.accelerator_of(device).memory_bytes for device in trial.plan.devices)
        peaks = trial.peak_memory_bytes, max(bytes_of_device.values())
        yield _Peak("peak_memory_bytes", "largest device", *peaks, limit)


def _far_off(field: str, measured: float, expected: float, expected_words: str) -> str:
    ratio = measured / max(expected, 1e-300)
    times = f"{ratio:,.0f}" if ratio > 1 else f"{ratio:.3g}"
    given = f"{measured:,}" if isinstance(measured, int) else f"{measured:.4g}"
    return f"{field} is {given}, {times} times the prediction of {expected_words}"
