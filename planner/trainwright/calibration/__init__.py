"""Calibration of the cost model by measured trials: few factors, robust fit, leave-one-out validation."""

from __future__ import annotations

from trainwright.calibration.calibrate import fit
from trainwright.calibration.fit_report import Errors, Evidence, Factor, Fit, FittedTrial, Quantity
from trainwright.calibration.implausible_measurements import Implausible, implausible
from trainwright.calibration.measured_trials import DeviceMemory, FailedTrial, Trial, Trials

__all__ = [
    "DeviceMemory",
    "Errors",
    "Evidence",
    "Factor",
    "FailedTrial",
    "Fit",
    "FittedTrial",
    "Implausible",
    "Quantity",
    "Trial",
    "Trials",
    "fit",
    "implausible",
]
