"""Figures of a plan that every table shows: rate per GPU, model FLOP utilisation, memory of its limit, number format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Final

from trainwright.layer import Dtype
from trainwright.report.units import rate, seconds
from trainwright.search import Candidate, Problem
from trainwright.throughput import throughput, tokens_per_row

SHORT_FORMATS: Final = {Dtype.FLOAT32: "fp32", Dtype.FLOAT16: "fp16", Dtype.BFLOAT16: "bf16"}
UNKNOWN: Final = "?"


@dataclass(frozen=True)
class PlanFigures:
    """Figures of one plan.

    Attributes:
        rate: tokens per second and GPU; rows where they are not sequences of tokens; infinite if an iteration takes no time.
        utilisation: model FLOPs over the peak of the plan's GPUs in its number format; None if a peak is not known.
        peak_bytes, limit_bytes: of the device that is fullest.
    """

    iteration_seconds: float
    rate: float
    utilisation: float | None
    peak_bytes: int
    limit_bytes: int
    dtype: Dtype

    @classmethod
    def of(cls, candidate: Candidate, problem: Problem) -> PlanFigures:
        estimate, plan = candidate.estimate, candidate.plan
        model = replace(problem.model, dtype=candidate.dtype or problem.model.dtype)
        limits = {
            device: problem.cluster.accelerator_of(device).memory_bytes for device, _ in estimate.memory_by_device
        }
        fullest, peak = max(estimate.memory_by_device, key=lambda item: item[1] / limits[item[0]])
        measured = None
        if estimate.iteration_seconds > 0:
            measured = throughput([estimate.iteration_seconds], plan, model, problem.cluster)
        a_second = None if measured is None else measured.tokens_per_second or measured.rows_per_second
        return cls(
            iteration_seconds=estimate.iteration_seconds,
            rate=inf if a_second is None else a_second / len(plan.devices),
            utilisation=None if measured is None else measured.utilisation,
            peak_bytes=peak,
            limit_bytes=limits[fullest],
            dtype=model.dtype,
        )

    @property
    def memory(self) -> str:
        """Peak memory of its limit, in GiB."""
        return f"{_gibibytes(self.peak_bytes)}/{_gibibytes(self.limit_bytes)}"

    @property
    def utilisation_words(self) -> str:
        return UNKNOWN if self.utilisation is None else f"{self.utilisation:.1%}"


def _gibibytes(num_bytes: int) -> str:
    """Format with one decimal, below a tenth with two significant digits."""
    return f"{num_bytes / 2**30:.1f}" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**30:.2g}"


Column = tuple[str, Callable[[PlanFigures], str]]


def figure_columns(problem: Problem) -> Sequence[Column]:
    """Return headings and cells of the figures."""
    unit = "rows" if tokens_per_row(problem.model.family) is None else "tok"
    return (
        ("iteration", lambda figures: seconds(figures.iteration_seconds)),
        (f"{unit}/s/GPU", lambda figures: rate(figures.rate)),
        ("MFU", lambda figures: figures.utilisation_words),
        ("memory", lambda figures: figures.memory),
        ("format", lambda figures: SHORT_FORMATS[figures.dtype]),
    )


def figure_fields(candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """Return the figures for JSON output, without those that are not known."""
    figures = PlanFigures.of(candidate, problem)
    unit = "rows" if tokens_per_row(problem.model.family) is None else "tokens"
    return {
        **({f"{unit}_per_second_per_device": figures.rate} if isfinite(figures.rate) else {}),
        **({} if figures.utilisation is None else {"model_flop_utilisation": figures.utilisation}),
        "memory_limit_bytes": figures.limit_bytes,
    }


FIGURES: Final = "MFU: model FLOPs of the GPUs' peak; memory: peak GiB of the limit, on the fullest device"
"""Legend of these columns."""
