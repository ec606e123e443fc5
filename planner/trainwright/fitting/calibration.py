"""From measured trials to the factors of a runtime."""

from __future__ import annotations

from typing import Final

import numpy as np

from trainwright.cost.estimate import estimate_in
from trainwright.cost.setting import Setting
from trainwright.fitting.account import Errors, Fit, FittedTrial, Quantity
from trainwright.fitting.evaluation import Evaluation, Predictor, measured_bytes, measured_seconds
from trainwright.fitting.factors import MemoryFactors, TimeFactors
from trainwright.fitting.held_back import Outcome, calibrate
from trainwright.fitting.trials import Trial, Trials

TIME_DEVIATION_RATIO: Final = 0.05
MEMORY_DEVIATION_RATIO: Final = 0.03
"""How far from a measurement a good prediction lies; beyond it a trial counts less and less."""


def fit(trials: Trials, setting: Setting, *, predict: Predictor = estimate_in) -> Fit:
    """The factors with which the cost model agrees with the trials.

    Every factor is pulled to what `setting.runtime` says, so that few trials move it little and one that no trial
    depends on stays. Trials count by soft-L1, so that one that went wrong does not carry the others away. A dozen
    steps of a few predictions for each trial are made.

    Raises ValueError, naming the trial, for a plan that does not belong to the setting, and where no trial was measured.
    """
    if not trials.trials:
        raise ValueError("there is nothing to fit: no trial was measured")
    evaluation = Evaluation(trials.trials, setting, predict)
    times, time = _fit_times(evaluation)
    runtime = times.applied(time.solution.values, setting.runtime) if time.helps else setting.runtime
    factors = times.account(time.solution, runtime)
    seconds = _quantities(time, [measured_seconds(trial) for trial in trials.trials])
    with_memory = [number for number, trial in enumerate(trials.trials) if measured_bytes(trial).size]
    held: dict[int, Quantity] = {}
    memory_helps = None
    if with_memory:
        memories, memory = _fit_memory(evaluation, with_memory)
        memory_helps = memory.helps
        runtime = memories.applied(memory.solution.values, runtime) if memory.helps else runtime
        factors += memories.account(memory.solution, runtime)
        sizes = _quantities(memory, [measured_bytes(trials.trials[number]) for number in with_memory])
        held = dict(zip(with_memory, sizes, strict=True))
    return Fit(
        runtime=runtime,
        factors=factors,
        trials=tuple(
            FittedTrial(trial.label, seconds[number], held.get(number), time.outliers[number])
            for number, trial in enumerate(trials.trials)
        ),
        time_errors=Errors.of(seconds),
        time_helps=time.helps,
        memory_errors=Errors.of(tuple(held.values())) if held else None,
        memory_helps=memory_helps,
    )


def _fit_times(evaluation: Evaluation) -> tuple[TimeFactors, Outcome]:
    setting, trials = evaluation.setting, evaluation.trials
    factors = TimeFactors(
        runtime=setting.runtime,
        accelerators=tuple(accelerator.name for accelerator in setting.cluster.accelerators),
        deviating=_deviating(trials, setting),
        fastest_seconds=min(trial.iteration_seconds for trial in trials),
        growth_is_derived=any(profile.samples == 0 for profile in setting.profiles.layers),
    )
    outcome = calibrate(
        lambda values, trial: evaluation.seconds(trial, factors.applied(values, setting.runtime)),
        tuple(measured_seconds(trial) for trial in trials),
        factors.nested,
        TIME_DEVIATION_RATIO,
    )
    return factors, outcome


def _fit_memory(evaluation: Evaluation, numbers: list[int]) -> tuple[MemoryFactors, Outcome]:
    """From the trials of those numbers, which measured memory."""
    runtime = evaluation.setting.runtime
    measured = tuple(measured_bytes(evaluation.trials[number]) for number in numbers)
    factors = MemoryFactors(runtime, smallest_bytes=float(np.min(np.concatenate(measured))))
    outcome = calibrate(
        lambda values, index: evaluation.peak_bytes(numbers[index], factors.applied(values, runtime)),
        measured,
        factors.nested,
        MEMORY_DEVIATION_RATIO,
    )
    return factors, outcome


def _deviating(trials: tuple[Trial, ...], setting: Setting) -> tuple[str, ...]:
    """The accelerators that the trials use, where they use several: then they can differ."""
    nodes = {device.node for trial in trials for device in trial.plan.devices}
    used = {node.accelerator for node in setting.cluster.nodes if node.name in nodes}
    return tuple(sorted(used)) if len(used) > 1 else ()


def _quantities(outcome: Outcome, measured: list[np.ndarray]) -> tuple[Quantity, ...]:
    after = outcome.after if outcome.helps else outcome.before
    return tuple(
        Quantity(*(float(np.max(numbers)) for numbers in of_trial))
        for of_trial in zip(measured, outcome.before, after, outcome.left_out, strict=True)
    )
