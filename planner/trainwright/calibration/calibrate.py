"""Fit of a runtime's factors to measured trials, with leave-one-out validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import log, sqrt
from statistics import fmean
from typing import Final

import numpy as np

from trainwright.calibration.factors import (
    Evaluation,
    MemoryFactors,
    TimeFactors,
    measured_bytes,
    measured_seconds,
)
from trainwright.calibration.fit_report import Errors, Evidence, Fit, FittedTrial, Quantity
from trainwright.calibration.implausible_measurements import refuse_implausible
from trainwright.calibration.measured_trials import Trial, Trials
from trainwright.calibration.memory_bounds import MemoryBounds, refuses, with_assumption_as_constant
from trainwright.calibration.robust_least_squares import Parameter, RobustFit, Vector, influences, loss, solve
from trainwright.cost.context import CostContext
from trainwright.runtime import OwnTrials

Predict = Callable[[Vector, int], Vector]
"""Predictions of one trial (one or several numbers) from parameter values and the trial's index."""

Report = Callable[[float], object]
"""Callback for progress, with the share that is done."""

OUTLIER: Final = 4.0
"""Absolute residual beyond which a trial is an outlier; its weight is below a quarter."""


@dataclass(frozen=True)
class CalibrationOutcome:
    """Predictions by trial: before the fit, after it, and with a fit to the other trials.

    Attributes:
        values: the fitted ones, lowered where trials bound them; those before, likewise lowered, if the fit does not help.
        helps: fits to the other trials predict better than no fit; true for a single trial, which cannot say.
        bounds_loss: loss of the bounds that the fit does not keep.
        evidence: what the trials say of every parameter, by name.
    """

    parameters: tuple[Parameter, ...]
    solution: RobustFit
    values: Vector
    before: tuple[Vector, ...]
    after: tuple[Vector, ...]
    left_out: tuple[Vector, ...]
    outliers: tuple[bool, ...]
    helps: bool
    bounds_loss: float
    evidence: Mapping[str, Evidence] = field(default_factory=dict)


@dataclass(frozen=True)
class _Residuals:
    """Residuals log(predicted / observed), in units of a good prediction's deviation; then those of bounds."""

    predict: Predict
    observed: tuple[Vector, ...]
    deviation_ratio: float
    bounds: MemoryBounds | None = None

    @property
    def owners(self) -> np.ndarray:
        """Trial of every residual; -1 for bounds of trials without observation."""
        observed = np.repeat(range(len(self.observed)), [len(numbers) for numbers in self.observed])
        return np.concatenate([observed, () if self.bounds is None else self.bounds.owners]).astype(np.int64)

    def of(self, predicted: Vector, trial: int) -> Vector:
        """Return a trial's residuals, scaled so that each trial weighs the same regardless of its number of values."""
        ratio = np.log(np.maximum(predicted, 1e-300) / self.observed[trial])
        return np.asarray(ratio / self.deviation_ratio / np.sqrt(len(ratio)), dtype=np.float64)

    def at(self, values: Vector) -> Vector:
        observed = [self.of(self.predict(values, trial), trial) for trial in range(len(self.observed))]
        return np.concatenate([*observed, self._of_bounds(values)])

    def _of_bounds(self, values: Vector) -> Vector:
        return np.zeros(0) if self.bounds is None else self.bounds.excess(values) / self.deviation_ratio

    def bounds_loss(self, values: Vector) -> float:
        return loss(self._of_bounds(values))

    def lowered(self, values: Vector, left_out: int | None = None) -> Vector:
        """Return values at which every trial that ran fits."""
        return values if self.bounds is None else self.bounds.lowered(values, left_out)

    def loss(self, predictions: Sequence[Vector]) -> float:
        return sum(loss(self.of(numbers, trial)) for trial, numbers in enumerate(predictions))


def calibrate(  # noqa: PLR0913 - predictions, observations and how to fit them
    predict: Predict,
    observed: tuple[Vector, ...],
    nested: Sequence[tuple[Parameter, ...]],
    deviation_ratio: float,
    *,
    report: Report = lambda _: None,
    bounds: MemoryBounds | None = None,
) -> CalibrationOutcome:
    """Return the fit, among those of `nested` parameter sets, that predicts left-out trials best and keeps the bounds.

    The first set is the simplest, and a later one must be better. A single trial without bounds gets the first. A trial is
    left out by the linearised residuals around the fit to all; the prediction for it is exact.
    """
    residuals = _Residuals(predict, observed, deviation_ratio, bounds)
    tried = nested if len(observed) > 1 or bounds is not None else nested[:1]
    sizes = [1 + sum(parameter.low < parameter.high for parameter in parameters) for parameters in tried]
    outcomes = list[CalibrationOutcome]()
    for parameters, done in zip(tried, accumulate(sizes), strict=True):
        outcomes.append(_outcome(residuals, parameters))
        report(done / sum(sizes))
    best = outcomes[0]
    for outcome in outcomes[1:]:
        gain = residuals.loss(best.left_out) - residuals.loss(outcome.left_out)
        if gain + best.bounds_loss - outcome.bounds_loss > (0.0 if gain else BOUND_GAIN):
            best = outcome
    return replace(best, evidence=_evidence(best, residuals, nested[-1]))


def _evidence(
    outcome: CalibrationOutcome, residuals: _Residuals, parameters: tuple[Parameter, ...]
) -> dict[str, Evidence]:
    """Return what the trials say of each parameter; those of the outcome may be held."""
    has_influence = influences(residuals.at, parameters, outcome.solution.values)
    return {
        chosen.name: Evidence.NO_INFLUENCE
        if not influence
        else Evidence.FITTED
        if outcome.helps and chosen.low < chosen.high
        else Evidence.HELD
        for chosen, influence in zip(outcome.parameters, has_influence, strict=True)
    }


def _outcome(residuals: _Residuals, parameters: tuple[Parameter, ...]) -> CalibrationOutcome:
    trials, owners = range(len(residuals.observed)), residuals.owners
    solution = solve(residuals.at, parameters)
    starts = np.array([parameter.start for parameter in parameters])
    before = tuple(residuals.predict(starts, trial) for trial in trials)
    left_out = tuple(
        residuals.predict(residuals.lowered(_without(solution, owners != trial, parameters), trial), trial)
        for trial in trials
    )
    bounds_loss = residuals.bounds_loss(solution.values)
    helps = len(trials) <= 1 or residuals.loss(left_out) + bounds_loss < residuals.loss(before) + residuals.bounds_loss(
        starts
    )
    values = residuals.lowered(solution.values if helps else starts)
    is_observed = np.arange(len(owners)) < sum(len(numbers) for numbers in residuals.observed)
    return CalibrationOutcome(
        parameters,
        solution,
        values,
        before,
        after=tuple(residuals.predict(values, trial) for trial in trials),
        left_out=left_out,
        outliers=tuple(
            bool(np.any(np.abs(solution.residuals[is_observed & (owners == trial)]) > OUTLIER)) for trial in trials
        ),
        helps=helps,
        bounds_loss=bounds_loss,
    )


def _without(solution: RobustFit, kept: np.ndarray, parameters: tuple[Parameter, ...]) -> Vector:
    residuals, jacobian = solution.residuals[kept], solution.jacobian[kept]

    def linear(values: Vector) -> Vector:
        return np.asarray(residuals + jacobian @ (values - solution.values), dtype=np.float64)

    return solve(linear, parameters, solution.values).values


TIME_DEVIATION_RATIO: Final = 0.05
MEMORY_DEVIATION_RATIO: Final = 0.03
"""Deviation of a good prediction from a measurement; beyond it a trial's weight falls."""
BOUND_GAIN: Final = 0.5
"""Loss of bounds by which a set of more factors must be better where left-out trials do not say: about one bound that is
exceeded by a deviation.
"""


def fit(trials: Trials, context: CostContext, report: Report = lambda _: None) -> Fit:
    """Fit the factors with which the cost model agrees with the trials.

    Plans that ran fit into memory, and those that ran out of it do not, unless only one of both can hold: then they fit.
    Every factor's prior is its value in `context.runtime`, so few trials move it little, and it stays if no trial
    depends on it. Soft-L1 bounds the influence of outliers. The fit makes a dozen steps of a few predictions per trial.
    `report` is called with the share of the fits that is done, by their numbers of factors.

    Raises ValueError, naming the trial, for a plan that does not belong to the context, for an iteration or a memory that
    no factor explains, and if no trial was measured.
    """
    if not trials.trials:
        raise ValueError(
            "there is nothing to fit: no trial was measured; add one that ran, with its iteration_seconds, under `trials`"
        )
    overfull = tuple(trial for trial in trials.failed if trial.out_of_memory)
    evaluation = Evaluation((*trials.trials, *overfull), context)
    refuse_implausible(evaluation)
    times, time = _fit_times(evaluation, trials.trials, report)
    runtime = times.apply(time.solution.values, context.runtime) if time.helps else context.runtime
    factors = times.account(time.solution, time.evidence, runtime)
    seconds = _quantities(time, [measured_seconds(trial) for trial in trials.trials])
    own = _own_trials(trials.trials, seconds, helps=time.helps)
    runtime = replace(runtime, own_trials=own, own_memory_trials=None)
    with_memory = tuple(number for number, trial in enumerate(trials.trials) if measured_bytes(trial).size)
    bounds = _memory_bounds(evaluation, trials.trials, with_memory)
    memory_quantities: dict[int, Quantity] = {}
    odd_memory: set[int] = set()
    unexplained: tuple[int, ...] = ()
    memory_helps = None
    if with_memory or overfull or refuses(context, evaluation, bounds.ran):
        memory, unexplained = _fit_memory(trials.trials, bounds)
        memory_helps = memory.helps
        runtime = bounds.factors.apply(memory.values, runtime)
        factors += bounds.factors.account(memory.solution, memory.evidence, runtime)
        sizes = _quantities(memory, [measured_bytes(trials.trials[number]) for number in with_memory])
        memory_quantities = dict(zip(with_memory, sizes, strict=True))
        own = _own_trials([trials.trials[number] for number in with_memory], sizes, helps=memory.helps)
        runtime = replace(runtime, own_memory_trials=own)
        odd_memory = {number for number, is_odd in zip(with_memory, memory.outliers, strict=True) if is_odd}
    return Fit(
        runtime=runtime,
        factors=factors,
        trials=tuple(
            FittedTrial(
                trial.label, seconds[number], memory_quantities.get(number), time.outliers[number], number in odd_memory
            )
            for number, trial in enumerate(trials.trials)
        ),
        time_errors=Errors.of(seconds),
        time_helps=time.helps,
        memory_errors=Errors.of(tuple(memory_quantities.values())) if memory_quantities else None,
        memory_helps=memory_helps,
        unexplained=tuple(evaluation.trials[number].label for number in unexplained),
    )


def _fit_times(
    evaluation: Evaluation, trials: tuple[Trial, ...], report: Report
) -> tuple[TimeFactors, CalibrationOutcome]:
    context = evaluation.context
    factors = TimeFactors(
        runtime=context.runtime,
        accelerators=tuple(accelerator.name for accelerator in context.cluster.accelerators),
        deviating=_deviating(trials, context),
        fastest_seconds=min(trial.iteration_seconds for trial in trials),
        growth_is_derived=any(profile.samples == 0 for profile in context.profiles.layers),
    )
    outcome = calibrate(
        lambda values, trial: np.array([evaluation.seconds(trial, factors.apply(values, context.runtime))]),
        tuple(measured_seconds(trial) for trial in trials),
        factors.nested,
        TIME_DEVIATION_RATIO,
        report=report,
    )
    return factors, outcome


def _own_trials(trials: Sequence[Trial], quantities: Sequence[Quantity], *, helps: bool) -> OwnTrials | None:
    """Return how many plans were tried, and the errors of predictions by the fit to the other trials, or without a fit."""
    count = len({trial.plan for trial in trials})
    if count < 2:
        return OwnTrials(count) if count else None
    predicted = [quantity.left_out if helps else quantity.before for quantity in quantities]
    errors = (log(quantity.measured / number) for quantity, number in zip(quantities, predicted, strict=True))
    return OwnTrials(count, sqrt(fmean(error**2 for error in errors)))


def _memory_bounds(evaluation: Evaluation, trials: tuple[Trial, ...], with_memory: tuple[int, ...]) -> MemoryBounds:
    peaks = (float(np.min(measured_bytes(trials[number]))) for number in with_memory)
    memories = (accelerator.memory_bytes for accelerator in evaluation.context.cluster.accelerators)
    runtime = with_assumption_as_constant(evaluation.context)
    factors = MemoryFactors(runtime, smallest_bytes=float(min(peaks, default=min(memories))))
    overfull = tuple(range(len(trials), len(evaluation.trials)))
    return MemoryBounds(evaluation, factors, tuple(range(len(trials))), overfull, with_memory)


def _fit_memory(trials: tuple[Trial, ...], bounds: MemoryBounds) -> tuple[CalibrationOutcome, tuple[int, ...]]:
    """Fit the memory factors to the trials that measured memory, within the bounds that all trials are.

    Trials that ran out of memory, which no factors explain beside those that ran, are set aside and returned: they would
    only take memory from other plans.
    """
    evaluation, factors, numbers = bounds.evaluation, bounds.factors, bounds.observations
    unexplained: tuple[int, ...] = ()
    while True:
        outcome = calibrate(
            lambda values, index: evaluation.peak_bytes(numbers[index], factors.apply(values, factors.runtime)),
            tuple(measured_bytes(trials[number]) for number in numbers),
            factors.nested,
            MEMORY_DEVIATION_RATIO,
            bounds=bounds,
        )
        aside = bounds.unexplained(outcome.values)
        if not aside:
            return outcome, unexplained
        unexplained, bounds = (*unexplained, *aside), bounds.without(aside)


def _deviating(trials: tuple[Trial, ...], context: CostContext) -> tuple[str, ...]:
    """Return the accelerators of the trials if there are several, since then they can deviate from each other."""
    nodes = {device.node for trial in trials for device in trial.plan.devices}
    used = {node.accelerator for node in context.cluster.nodes if node.name in nodes}
    return tuple(sorted(used)) if len(used) > 1 else ()


def _quantities(outcome: CalibrationOutcome, measured: list[np.ndarray]) -> tuple[Quantity, ...]:
    return tuple(
        Quantity(*(float(np.max(numbers)) for numbers in of_trial))
        for of_trial in zip(measured, outcome.before, outcome.after, outcome.left_out, strict=True)
    )
