"""What a calibration found, trial by trial and factor by factor, so that a person can believe it or not."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor before and after the fit.

    Attributes:
        name: the runtime's field; of compute_ratios one for each accelerator, named behind it.
        deviation: how far off `after` may still be, one standard deviation: a share of it for ratios, in its own unit
            for constants. Where no trial informs it, what was expected beforehand.
        informed: whether it was fitted and any trial depends on it; otherwise it is as it was, for few trials are
            often told best by the shared compute ratio alone.
    """

    name: str
    before: float
    after: float
    deviation: float
    informed: bool


@dataclass(frozen=True, slots=True)
class Quantity:
    """A trial's seconds or peak bytes: measured, and predicted before the fit, after it, and by a fit without the trial."""

    measured: float
    before: float
    after: float
    left_out: float


@dataclass(frozen=True, slots=True)
class FittedTrial:
    """One trial in the fit.

    Attributes:
        peak_bytes: of the device that held most; None where memory was not measured.
        is_outlier: whether the fit leaves its seconds so far off that it hardly counts.
    """

    name: str
    iteration_seconds: Quantity
    peak_bytes: Quantity | None
    is_outlier: bool


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean absolute errors over the trials, as shares of what was measured.

    Attributes:
        left_out: each trial predicted by a fit to the others: what to expect of plans that were not measured.
    """

    before: float
    after: float
    left_out: float

    @classmethod
    def of(cls, quantities: tuple[Quantity, ...]) -> Errors:
        """Over at least one quantity."""
        return cls(
            *(
                sum(abs(getattr(quantity, name) / quantity.measured - 1) for quantity in quantities) / len(quantities)
                for name in ("before", "after", "left_out")
            )
        )


@dataclass(frozen=True)
class Fit:
    """What calibration found.

    Attributes:
        runtime: to estimate with from now on; factors that did not help are as they were.
        time_helps, memory_helps: whether trials are predicted better by a fit to the others than without one; where
            not, the factors of time (of memory) are kept as they were. A single trial cannot tell and is believed.
        memory_errors, memory_helps: None where no trial measured memory.
    """

    runtime: Runtime
    factors: tuple[Factor, ...]
    trials: tuple[FittedTrial, ...]
    time_errors: Errors
    time_helps: bool
    memory_errors: Errors | None
    memory_helps: bool | None
