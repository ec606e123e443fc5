"""Trials predicted by the cost model, and what was measured of them, as numbers to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from trainwright.cluster import Device
from trainwright.cost.setting import Setting
from trainwright.fitting.robust import Vector
from trainwright.fitting.trials import Trial
from trainwright.plan import Plan
from trainwright.runtime import Runtime


class Prediction(Protocol):
    """What is compared with a trial; the cost model's estimate is one."""

    @property
    def iteration_seconds(self) -> float: ...
    @property
    def peak_memory_bytes(self) -> int: ...
    @property
    def memory_by_device(self) -> tuple[tuple[Device, int], ...]: ...


Predictor = Callable[[Plan, Setting], Prediction]


class Evaluation:
    """Predictions of trials in one setting, each made once for a runtime."""

    def __init__(self, trials: tuple[Trial, ...], setting: Setting, predict: Predictor) -> None:
        self.trials, self.setting, self._predict = trials, setting, predict
        self._settings: dict[Runtime, Setting] = {}
        self._made: dict[tuple[int, Runtime], Prediction] = {}

    def seconds(self, trial: int, runtime: Runtime) -> Vector:
        """One number."""
        return np.array([self._of(trial, runtime).iteration_seconds])

    def peak_bytes(self, trial: int, runtime: Runtime) -> Vector:
        """Of the devices that were measured one by one, in their order; else of the one that holds most."""
        found = self._of(trial, runtime)
        devices = self.trials[trial].memory_by_device
        if not devices:
            return np.array([found.peak_memory_bytes], dtype=np.float64)
        held = dict(found.memory_by_device)
        return np.array([held[memory.device] for memory in devices], dtype=np.float64)

    def _of(self, trial: int, runtime: Runtime) -> Prediction:
        if (trial, runtime) not in self._made:
            try:
                found = self._predict(self.trials[trial].plan, self._setting_with(runtime))
            except ValueError as error:
                raise ValueError(f"trial {trial} ({self.trials[trial].label}): {error}") from None
            self._made[trial, runtime] = found
        return self._made[trial, runtime]

    def _setting_with(self, runtime: Runtime) -> Setting:
        """One setting serves all trials: it keeps what they share."""
        if runtime not in self._settings:
            self._settings[runtime] = replace(self.setting, runtime=runtime)
        return self._settings[runtime]


def measured_seconds(trial: Trial) -> Vector:
    """One number."""
    return np.array([trial.iteration_seconds])


def measured_bytes(trial: Trial) -> Vector:
    """As many numbers as `Evaluation.peak_bytes` gives; none where memory was not measured."""
    by_device = [memory.peak_bytes for memory in trial.memory_by_device]
    peak = [] if trial.peak_memory_bytes is None else [trial.peak_memory_bytes]
    return np.array(by_device or peak, dtype=np.float64)
