"""Factors of a runtime as parameters with bounds and priors, and the predictions under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Final, TypeVar

import numpy as np

from trainwright.calibration.fit_report import Evidence, Factor
from trainwright.calibration.measured_trials import FailedTrial, Trial
from trainwright.calibration.robust_least_squares import Parameter, RobustFit, Vector
from trainwright.cluster import Device
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import iteration_seconds, memory_by_device
from trainwright.plan import Plan
from trainwright.runtime import ComputeRatio, Runtime

T = TypeVar("T")


class Evaluation:
    """Predicted seconds and memory of trials in one context, each cached by runtime.

    Raises ValueError, naming the trial, if its plan does not belong to the context.
    """

    def __init__(self, trials: tuple[Trial | FailedTrial, ...], context: CostContext) -> None:
        self.trials, self.context = trials, context
        self._settings: dict[Runtime, CostContext] = {}
        self._seconds: dict[tuple[int, Runtime], float] = {}
        self._memory: dict[tuple[int, Runtime], dict[Device, int]] = {}

    def seconds(self, trial: int, runtime: Runtime) -> float:
        """Return the predicted iteration seconds."""
        key = (trial, runtime)
        if key not in self._seconds:
            self._seconds[key] = self._predicted(iteration_seconds, *key)
        return self._seconds[key]

    def memory(self, trial: int, runtime: Runtime) -> dict[Device, int]:
        """Return the predicted peak bytes of every device."""
        key = (trial, runtime)
        if key not in self._memory:
            self._memory[key] = dict(self._predicted(memory_by_device, *key))
        return self._memory[key]

    def peak_bytes(self, trial: int, runtime: Runtime) -> Vector:
        """Return predicted peaks of the devices that were measured individually, else the maximum over devices."""
        bytes_of_device = self.memory(trial, runtime)
        measured = self.trials[trial]
        devices = measured.memory_by_device if isinstance(measured, Trial) else ()
        peaks = [bytes_of_device[device_memory.device] for device_memory in devices] or [max(bytes_of_device.values())]
        return np.array(peaks, dtype=np.float64)

    def filled_share(self, trial: int, runtime: Runtime) -> float:
        """Return the share of its memory that the fullest device is predicted to fill.

        A plan that ran out of memory filled one of them; one that ran filled none beyond it.
        """
        limits = self.context.memory_of_node
        return max(size / limits[device.node] for device, size in self.memory(trial, runtime).items())

    def _predicted(self, predict: Callable[[Plan, CostContext], T], trial: int, runtime: Runtime) -> T:
        try:
            return predict(self.trials[trial].plan, self._setting_with(runtime))
        except ValueError as error:
            raise ValueError(f"trial {trial} ({self.trials[trial].label}): {error}") from None

    def _setting_with(self, runtime: Runtime) -> CostContext:
        """Return the context with a runtime; all trials share it and its caches."""
        if runtime not in self._settings:
            self._settings[runtime] = replace(self.context, runtime=runtime)
        return self._settings[runtime]


def measured_seconds(trial: Trial) -> Vector:
    """Return the measured iteration seconds as an array of one."""
    return np.array([trial.iteration_seconds])


def measured_bytes(trial: Trial) -> Vector:
    """Return measured peaks in the order of `Evaluation.peak_bytes`; empty if memory was not measured."""
    by_device = [memory.peak_bytes for memory in trial.memory_by_device]
    peak = [] if trial.peak_memory_bytes is None else [trial.peak_memory_bytes]
    return np.array(by_device or peak, dtype=np.float64)


COMPUTE_SPREAD: Final = 0.5
"""Prior deviation of the shared ratio: with profiles of another runtime or clock, 1.5 times is plausible."""
ACCELERATOR_SPREAD: Final = 0.15
"""Prior deviation of one accelerator from the shared ratio: accelerators differ less from each other than from
profiles.
"""
LINK_SPREAD: Final = 0.4
OVERLAP_SPREAD: Final = 0.1
MEASURED_GROWTH_SPREAD: Final = 0.05
DERIVED_GROWTH_SPREAD: Final = 0.3
"""Prior deviations of the growth over rows: small if it was measured, large if a data sheet gave it."""
CONSTANT_SPREAD: Final = 0.03
MAX_CONSTANT: Final = 0.5
"""Maximum of constant_seconds, as a share of the fastest measured iteration."""
MAX_RATIO: Final = 20.0
"""Ratio of a measured iteration or peak to its prediction, or the inverse, beyond which no factor's bounds reach."""
ACTIVATION_SPREAD: Final = 0.2
CONSTANT_MEMORY_SPREAD: Final = 0.2
COPIES_UNIT_BYTES: Final = 16.0
COPIES_SPREAD: Final = 0.25
MAX_COPIES: Final = 1.5
"""Prior deviation and maximum of copied_bytes_per_parameter, in units of what mixed precision holds with Adam."""
MAX_CONSTANT_MEMORY: Final = 0.9
"""Maximum of constant_bytes, as a share of the smallest measured peak."""


@dataclass(frozen=True)
class TimeFactors:
    """Factors of an iteration's seconds; ratios are fitted as logarithms.

    Attributes:
        runtime: before the fit.
        accelerators: of the cluster; all share one ratio, from which the `deviating` ones deviate.
        deviating: accelerators of the trials, if they use several.
        fastest_seconds: fastest measured iteration, the unit of constant_seconds.
        growth_is_derived: the profiles' growth over rows was derived, not measured.
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
            _ratio("inside_link_ratio", runtime.inside_ratio, 0.05, 4.0, LINK_SPREAD),
            _ratio("overlap_slowdown_ratio", runtime.overlap_slowdown_ratio, 1.0, 3.0, OVERLAP_SPREAD),
            _ratio("row_growth_ratio", runtime.row_growth_ratio, 0.2, 3.0, growth_spread),
            Parameter("constant_seconds", constant, 0.0, max(MAX_CONSTANT, constant), CONSTANT_SPREAD),
            *(
                Parameter(f"compute_ratio {name}", 0.0, log(0.5), log(2.0), ACCELERATOR_SPREAD)
                for name in self.deviating
            ),
        )

    @property
    def nested(self) -> tuple[tuple[Parameter, ...], ...]:
        """Parameter sets to choose from: only the shared compute ratio, or all."""
        first, *others = self.parameters
        return (first, *(parameter.held for parameter in others)), self.parameters

    def apply(self, values: Vector, runtime: Runtime) -> Runtime:
        """Return the runtime with these parameter values."""
        shared, link, inside, overlap, growth, constant, *deviations = (float(value) for value in values)
        deviation = dict(zip(self.deviating, deviations, strict=True))
        return replace(
            runtime,
            compute_ratios=tuple(
                ComputeRatio(name, self.runtime.compute_ratio(name) * exp(shared + deviation.get(name, 0.0)))
                for name in self.accelerators
            ),
            link_ratio=exp(link),
            inside_link_ratio=None if inside == link else exp(inside),
            overlap_slowdown_ratio=max(exp(overlap), 1.0),
            row_growth_ratio=exp(growth),
            constant_seconds=constant * self.fastest_seconds,
        )

    def account(self, solution: RobustFit, evidence: Mapping[str, Evidence], after: Runtime) -> tuple[Factor, ...]:
        """Return every factor with its value in `after`; an accelerator's shared and own ratios are combined."""
        names = [parameter.name for parameter in self.parameters]
        covariance = solution.covariance(self.parameters)

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
                evidence["compute_ratio"],
            )
            for name in self.accelerators
        ) + tuple(
            Factor(
                name,
                _value(self.runtime, name),
                _value(after, name),
                unit.get(name, 1.0) * deviation(name),
                evidence[name],
            )
            for name in (
                "link_ratio",
                "inside_link_ratio",
                "overlap_slowdown_ratio",
                "row_growth_ratio",
                "constant_seconds",
            )
        )


@dataclass(frozen=True)
class MemoryFactors:
    """Factors of a device's peak bytes.

    Attributes:
        runtime: before the fit; the memory that is assumed of a process is its constant.
        smallest_bytes: smallest peak that was measured, or memory that did not suffice: the unit of constant_bytes.
    """

    runtime: Runtime
    smallest_bytes: float

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        constant = self.runtime.constant_bytes / self.smallest_bytes
        highest = max(MAX_CONSTANT_MEMORY, constant)
        return (
            _ratio("activation_ratio", self.runtime.activation_ratio, 0.3, 3.0, ACTIVATION_SPREAD),
            Parameter("constant_bytes", constant, 0.0, highest, CONSTANT_MEMORY_SPREAD),
            Parameter(
                "copied_bytes_per_parameter",
                self.runtime.copied_bytes_per_parameter / COPIES_UNIT_BYTES,
                0.0,
                max(MAX_COPIES, self.runtime.copied_bytes_per_parameter / COPIES_UNIT_BYTES),
                COPIES_SPREAD,
            ),
        )

    @property
    def nested(self) -> tuple[tuple[Parameter, ...], ...]:
        """Parameter sets to choose from: the constant alone, with one of the others, or all."""
        activation, constant, copies = self.parameters
        return (
            (activation.held, constant, copies.held),
            (activation, constant, copies.held),
            (activation.held, constant, copies),
            self.parameters,
        )

    def apply(self, values: Vector, runtime: Runtime) -> Runtime:
        """Return the runtime with these parameter values."""
        activation, constant, copies = (float(value) for value in values)
        return replace(
            runtime,
            activation_ratio=exp(activation),
            constant_bytes=round(constant * self.smallest_bytes),
            copied_bytes_per_parameter=copies * COPIES_UNIT_BYTES,
            process_bytes=self.runtime.process_bytes,
        )

    def with_constant(self, values: Vector, num_bytes: float) -> Vector:
        """Return the parameter values with another constant."""
        activation, _, copies = values
        return np.array([activation, num_bytes / self.smallest_bytes, copies])

    def account(self, solution: RobustFit, evidence: Mapping[str, Evidence], after: Runtime) -> tuple[Factor, ...]:
        """Return all factors with their values in `after`."""
        deviations = np.sqrt(np.diag(solution.covariance(self.parameters)))
        units = {"constant_bytes": self.smallest_bytes, "copied_bytes_per_parameter": COPIES_UNIT_BYTES}
        return tuple(
            Factor(
                parameter.name,
                _value(self.runtime, parameter.name),
                _value(after, parameter.name),
                units.get(parameter.name, 1.0) * float(deviation),
                evidence[parameter.name],
            )
            for parameter, deviation in zip(self.parameters, deviations, strict=True)
        )


def _value(runtime: Runtime, name: str) -> float:
    return runtime.inside_ratio if name == "inside_link_ratio" else float(getattr(runtime, name))


def _ratio(name: str, start: float, low: float, high: float, spread: float) -> Parameter:
    """Return the parameter of a ratio's logarithm; a start beyond the bounds widens them."""
    return Parameter(name, log(start), log(min(low, start)), log(max(high, start)), spread)
