"""The factors of a runtime as numbers to fit: what each stands for, its bounds, and how far from 1 one expects it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Final

import numpy as np

from trainwright.fitting.account import Factor
from trainwright.fitting.robust import Parameter, Solution, Vector
from trainwright.runtime import ComputeRatio, Runtime

COMPUTE_SPREAD: Final = 0.5
"""Profiles of another runtime, another clock: half as long again is no surprise."""
ACCELERATOR_SPREAD: Final = 0.15
"""Accelerators deviate less from each other than all of them from the profiles."""
LINK_SPREAD: Final = 0.4
OVERLAP_SPREAD: Final = 0.1
MEASURED_GROWTH_SPREAD: Final = 0.05
DERIVED_GROWTH_SPREAD: Final = 0.3
"""Of how time grows with the rows: narrow where it was measured, wide where a data sheet told it."""
CONSTANT_SPREAD: Final = 0.03
MOST_CONSTANT: Final = 0.5
"""Of the fastest measured iteration."""
ACTIVATION_SPREAD: Final = 0.2
CONSTANT_MEMORY_SPREAD: Final = 0.2
MOST_CONSTANT_MEMORY: Final = 0.9
"""Of the smallest measured peak."""


@dataclass(frozen=True)
class TimeFactors:
    """What scales an iteration's seconds. Ratios are fitted by their logarithms.

    Attributes:
        runtime: as it stands before the fit.
        accelerators: of the cluster; all of them share one ratio, from which those that `deviate` do.
        deviating: those that the trials use, where they use several.
        fastest_seconds: the fastest measured iteration, the unit of constant_seconds.
        growth_is_derived: whether the profiles' growth with the rows was derived, not measured.
    """

    runtime: Runtime
    accelerators: tuple[str, ...]
    deviating: tuple[str, ...]
    fastest_seconds: float
    growth_is_derived: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        runtime = self.runtime
        growth_spread = DERIVED_GROWTH_SPREAD if self.growth_is_derived else MEASURED_GROWTH_SPREAD
        constant = runtime.constant_seconds / self.fastest_seconds
        return (
            Parameter("compute_ratio", 0.0, log(0.2), log(5.0), COMPUTE_SPREAD),
            _ratio("link_ratio", runtime.link_ratio, 0.05, 4.0, LINK_SPREAD),
            _ratio("overlap_slowdown_ratio", runtime.overlap_slowdown_ratio, 1.0, 3.0, OVERLAP_SPREAD),
            _ratio("row_growth_ratio", runtime.row_growth_ratio, 0.2, 3.0, growth_spread),
            Parameter("constant_seconds", constant, 0.0, max(MOST_CONSTANT, constant), CONSTANT_SPREAD),
            *(
                Parameter(f"compute_ratio {name}", 0.0, log(0.5), log(2.0), ACCELERATOR_SPREAD)
                for name in self.deviating
            ),
        )

    @property
    def nested(self) -> tuple[tuple[Parameter, ...], ...]:
        """The shared compute ratio alone; then all of them."""
        first, *others = self.parameters
        return (first, *(parameter.held for parameter in others)), self.parameters

    def applied(self, values: Vector, runtime: Runtime) -> Runtime:
        """The runtime with these factors in it."""
        shared, link, overlap, growth, constant, *deviations = (float(value) for value in values)
        deviation = dict(zip(self.deviating, deviations, strict=True))
        return replace(
            runtime,
            compute_ratios=tuple(
                ComputeRatio(name, self.runtime.compute_ratio(name) * exp(shared + deviation.get(name, 0.0)))
                for name in self.accelerators
            ),
            link_ratio=exp(link),
            overlap_slowdown_ratio=max(exp(overlap), 1.0),
            row_growth_ratio=exp(growth),
            constant_seconds=constant * self.fastest_seconds,
        )

    def account(self, solution: Solution, after: Runtime) -> tuple[Factor, ...]:
        """Every factor as the fit found it and as `after` holds it; an accelerator's two parts add up."""
        names = [parameter.name for parameter in self.parameters]
        covariance = solution.covariance(self.parameters)
        informed = dict(zip(names, solution.informed.tolist(), strict=True))

        def deviation(*summed: str) -> float:
            places = [names.index(name) for name in summed if name in names]
            return sqrt(float(covariance[np.ix_(places, places)].sum()))

        unit = {"constant_seconds": self.fastest_seconds}
        return tuple(
            Factor(
                f"compute_ratio {name}",
                self.runtime.compute_ratio(name),
                after.compute_ratio(name),
                deviation("compute_ratio", f"compute_ratio {name}"),
                informed["compute_ratio"],
            )
            for name in self.accelerators
        ) + tuple(
            Factor(
                name,
                getattr(self.runtime, name),
                getattr(after, name),
                unit.get(name, 1.0) * deviation(name),
                informed[name],
            )
            for name in ("link_ratio", "overlap_slowdown_ratio", "row_growth_ratio", "constant_seconds")
        )


@dataclass(frozen=True)
class MemoryFactors:
    """What scales a device's peak bytes.

    Attributes:
        runtime: as it stands before the fit.
        smallest_bytes: the smallest measured peak, the unit of constant_bytes.
    """

    runtime: Runtime
    smallest_bytes: float

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        constant = self.runtime.constant_bytes / self.smallest_bytes
        highest = max(MOST_CONSTANT_MEMORY, constant)
        return (
            _ratio("activation_ratio", self.runtime.activation_ratio, 0.3, 3.0, ACTIVATION_SPREAD),
            Parameter("constant_bytes", constant, 0.0, highest, CONSTANT_MEMORY_SPREAD),
        )

    @property
    def nested(self) -> tuple[tuple[Parameter, ...], ...]:
        """The constant alone; then both."""
        activation, constant = self.parameters
        return (activation.held, constant), self.parameters

    def applied(self, values: Vector, runtime: Runtime) -> Runtime:
        """The runtime with these factors in it."""
        activation, constant = (float(value) for value in values)
        return replace(runtime, activation_ratio=exp(activation), constant_bytes=round(constant * self.smallest_bytes))

    def account(self, solution: Solution, after: Runtime) -> tuple[Factor, ...]:
        """Both factors as the fit found them and as `after` holds them."""
        activation, constant = np.sqrt(np.diag(solution.covariance(self.parameters))).tolist()
        constant *= self.smallest_bytes
        informed = solution.informed.tolist()
        before = self.runtime
        return (
            Factor("activation_ratio", before.activation_ratio, after.activation_ratio, activation, informed[0]),
            Factor("constant_bytes", before.constant_bytes, after.constant_bytes, constant, informed[1]),
        )


def _ratio(name: str, start: float, low: float, high: float, spread: float) -> Parameter:
    """A ratio by its logarithm; a start beyond the bounds widens them."""
    return Parameter(name, log(start), log(min(low, start)), log(max(high, start)), spread)
