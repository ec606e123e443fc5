"""Report of a calibration, trial by trial and factor by factor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainwright.runtime import Runtime


class Evidence(StrEnum):
    """Verdict of the trials on a factor."""

    FITTED = "fitted"
    HELD = "held for want of evidence"
    NO_INFLUENCE = "no influence"


@dataclass(frozen=True, slots=True)
class Factor:
    """Factor before and after the fit.

    Attributes:
        name: field of the runtime; for compute ratios followed by the accelerator.
        deviation: standard deviation of `after`, relative for ratios, in the factor's unit for constants; the prior's
            where it was not fitted.
        evidence: whether it was fitted. It is held where trials depend on it, but fewer factors, or none, predict
            left-out trials better: the shared compute ratio alone often predicts few trials best.
    """

    name: str
    before: float
    after: float
    deviation: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Quantity:
    """Trial's seconds or peak bytes: measured, predicted before and after the fit, and by a fit without the trial."""

    measured: float
    before: float
    after: float
    left_out: float


@dataclass(frozen=True, slots=True)
class FittedTrial:
    """Trial in the fit.

    Attributes:
        peak_bytes: maximum over the devices; None if memory was not measured.
        is_outlier: the fit leaves its seconds so far off that they hardly count.
        is_memory_outlier: likewise its peak bytes.
    """

    name: str
    iteration_seconds: Quantity
    peak_bytes: Quantity | None
    is_outlier: bool
    is_memory_outlier: bool = False


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean absolute errors over the trials, relative to the measurements.

    Attributes:
        left_out: each trial predicted by a fit to the others: the error to expect of plans without measurement.
    """

    before: float
    after: float
    left_out: float

    @classmethod
    def of(cls, quantities: tuple[Quantity, ...]) -> Errors:
        """Average over at least one quantity."""
        return cls(
            *(
                sum(abs(getattr(quantity, name) / quantity.measured - 1) for quantity in quantities) / len(quantities)
                for name in ("before", "after", "left_out")
            )
        )


@dataclass(frozen=True)
class Fit:
    """Result of a calibration.

    Attributes:
        runtime: for estimates from now on; factors that did not help are unchanged.
        time_helps, memory_helps: a fit to the other trials predicts a trial better than no fit; if not, the factors of
            time (of memory) are unchanged. True for a single trial, which cannot say.
        memory_errors, memory_helps: None if no trial measured memory.
        unexplained: names of trials that ran out of memory, which no factors explain beside those that ran.
    """

    runtime: Runtime
    factors: tuple[Factor, ...]
    trials: tuple[FittedTrial, ...]
    time_errors: Errors
    time_helps: bool
    memory_errors: Errors | None
    memory_helps: bool | None
    unexplained: tuple[str, ...] = ()
