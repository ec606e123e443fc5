"""Fitting the cost model to measured trials: a few interpretable factors, robustly, and with an honest account."""

from __future__ import annotations

from trainwright.fitting.account import Errors, Factor, Fit, FittedTrial, Quantity
from trainwright.fitting.calibration import fit
from trainwright.fitting.trials import DeviceMemory, FailedTrial, Trial, Trials

__all__ = [
    "DeviceMemory",
    "Errors",
    "Factor",
    "FailedTrial",
    "Fit",
    "FittedTrial",
    "Quantity",
    "Trial",
    "Trials",
    "fit",
]
