"""Data sheets of accelerators and machines, and layer profiles estimated from them."""

from __future__ import annotations

from trainwright.accelerators.data_sheets import DataSheet, data_sheet, data_sheets, has_data_sheet
from trainwright.accelerators.machines import Machine, cluster_of, machine, machines
from trainwright.accelerators.number_formats import (
    PREFERRED,
    FormatChoice,
    best_format,
    emulating,
    format_choices,
    is_native,
)
from trainwright.accelerators.profile_names import names_of_same_sheet, with_names
from trainwright.accelerators.roofline import estimate_profiles
from trainwright.accelerators.scaling_curves import Curve, curve_from, extrapolated

__all__ = [
    "PREFERRED",
    "Curve",
    "DataSheet",
    "FormatChoice",
    "Machine",
    "best_format",
    "cluster_of",
    "curve_from",
    "data_sheet",
    "data_sheets",
    "emulating",
    "estimate_profiles",
    "extrapolated",
    "format_choices",
    "has_data_sheet",
    "is_native",
    "machine",
    "machines",
    "names_of_same_sheet",
    "with_names",
]
