"""Fit of a runtime's factors to measured trials, with leave-one-out validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
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
from trainwright.calibration.robust_least_squares import Parameter, RobustFit, Vector, influences, loss, solve
from trainwright.cost.context import CostContext

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
        helps: fits to the other trials predict better than no fit; true for a single trial, which cannot say.
        evidence: what the trials say of every parameter, by name.
    """

    parameters: tuple[Parameter, ...]
    solution: RobustFit
    before: tuple[Vector, ...]
    after: tuple[Vector, ...]
    left_out: tuple[Vector, ...]
    outliers: tuple[bool, ...]
    helps: bool
    evidence: Mapping[str, Evidence] = field(default_factory=dict)


@dataclass(frozen=True)
class _Residuals:
    """Residuals log(predicted / observed), in units of a good prediction's deviation."""

    predict: Predict
    observed: tuple[Vector, ...]
    deviation_ratio: float

    @property
    def owners(self) -> np.ndarray:
        """Trial of every residual."""
        return np.repeat(range(len(self.observed)), [len(numbers) for numbers in self.observed])

    def of(self, predicted: Vector, trial: int) -> Vector:
        """Return a trial's residuals, scaled so that each trial weighs the same regardless of its number of values."""
        ratio = np.log(np.maximum(predicted, 1e-300) / self.observed[trial])
        return np.asarray(ratio / self.deviation_ratio / np.sqrt(len(ratio)), dtype=np.float64)

    def at(self, values: Vector) -> Vector:
        return np.concatenate([self.of(self.predict(values, trial), trial) for trial in range(len(self.observed))])

    def loss(self, predictions: Sequence[Vector]) -> float:
        return sum(loss(self.of(numbers, trial)) for trial, numbers in enumerate(predictions))


def calibrate(
    predict: Predict,
    observed: tuple[Vector, ...],
    nested: Sequence[tuple[Parameter, ...]],
    deviation_ratio: float,
    report: Report = lambda _: None,
) -> CalibrationOutcome:
    """Return the fit, among those of `nested` parameter sets, that predicts left-out trials best.

    The first set is the simplest, and a later one must be better. A single trial gets the first. A trial is left out by
    the linearised residuals around the fit to all; the prediction for it is exact.
    """
    residuals = _Residuals(predict, observed, deviation_ratio)
    tried = nested if len(observed) > 1 else nested[:1]
    sizes = [1 + sum(parameter.low < parameter.high for parameter in parameters) for parameters in tried]
    outcomes = list[CalibrationOutcome]()
    for parameters, done in zip(tried, accumulate(sizes), strict=True):
        outcomes.append(_outcome(residuals, parameters))
        report(done / sum(sizes))
    best = min(outcomes, key=lambda outcome: residuals.loss(outcome.left_out))
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
    left_out = tuple(residuals.predict(_without(solution, owners != trial, parameters), trial) for trial in trials)
    return CalibrationOutcome(
        parameters,
        solution,
        before,
        after=tuple(residuals.predict(solution.values, trial) for trial in trials),
        left_out=left_out,
        outliers=tuple(bool(np.any(np.abs(solution.residuals[owners == trial]) > OUTLIER)) for trial in trials),
        helps=len(trials) == 1 or residuals.loss(left_out) < residuals.loss(before),
    )


def _without(solution: RobustFit, kept: np.ndarray, parameters: tuple[Parameter, ...]) -> Vector:
    residuals, jacobian = solution.residuals[kept], solution.jacobian[kept]

    def linear(values: Vector) -> Vector:
        return np.asarray(residuals + jacobian @ (values - solution.values), dtype=np.float64)

    return solve(linear, parameters, solution.values).values


TIME_DEVIATION_RATIO: Final = 0.05
MEMORY_DEVIATION_RATIO: Final = 0.03
"""Deviation of a good prediction from a measurement; beyond it a trial's weight falls."""


def fit(trials: Trials, context: CostContext, report: Report = lambda _: None) -> Fit:
    """Fit the factors with which the cost model agrees with the trials, and plans do not fit that ran out of memory.

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
    with_memory = [number for number, trial in enumerate(trials.trials) if measured_bytes(trial).size]
    memory_quantities: dict[int, Quantity] = {}
    odd_memory: set[int] = set()
    memory_helps = None
    if with_memory or overfull:
        memories, memory = _fit_memory(evaluation, trials.trials, with_memory)
        memory_helps = memory.helps
        runtime = memories.apply(memory.solution.values, runtime) if memory.helps else runtime
        factors += memories.account(memory.solution, memory.evidence, runtime)
        sizes = _quantities(memory, [measured_bytes(trials.trials[number]) for number in with_memory])
        memory_quantities = dict(zip(with_memory, sizes, strict=True))
        odd_memory = {number for number, is_odd in zip(with_memory, memory.outliers, strict=False) if is_odd}
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
        report,
    )
    return factors, outcome


def _fit_memory(
    evaluation: Evaluation, trials: tuple[Trial, ...], numbers: list[int]
) -> tuple[MemoryFactors, CalibrationOutcome]:
    """Fit the memory factors to the trials `numbers`, which measured memory, and to those that ran out of it.

    The latter are bounds: they count only if they are predicted to fit.
    """
    runtime = evaluation.context.runtime
    measured = tuple(measured_bytes(trials[number]) for number in numbers)
    memories = (accelerator.memory_bytes for accelerator in evaluation.context.cluster.accelerators)
    factors = MemoryFactors(
        runtime, smallest_bytes=float(min((np.min(peaks) for peaks in measured), default=min(memories)))
    )
    overfull = range(len(trials), len(evaluation.trials))

    def predict(values: Vector, index: int) -> Vector:
        changed = factors.apply(values, runtime)
        if index < len(numbers):
            return evaluation.peak_bytes(numbers[index], changed)
        return evaluation.filled_share(overfull[index - len(numbers)], changed)

    outcome = calibrate(
        predict,
        (*measured, *(np.ones(1) for _ in overfull)),
        factors.nested,
        MEMORY_DEVIATION_RATIO,
    )
    return factors, outcome


def _deviating(trials: tuple[Trial, ...], context: CostContext) -> tuple[str, ...]:
    """Return the accelerators of the trials if there are several, since then they can deviate from each other."""
    nodes = {device.node for trial in trials for device in trial.plan.devices}
    used = {node.accelerator for node in context.cluster.nodes if node.name in nodes}
    return tuple(sorted(used)) if len(used) > 1 else ()


def _quantities(outcome: CalibrationOutcome, measured: list[np.ndarray]) -> tuple[Quantity, ...]:
    after = outcome.after if outcome.helps else outcome.before
    return tuple(
        Quantity(*(float(np.max(numbers)) for numbers in of_trial))
        for of_trial in zip(measured, outcome.before, after, outcome.left_out, strict=False)
    )
