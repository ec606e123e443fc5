"""Data sheets of accelerators and machines, and layer profiles estimated from them."""

from __future__ import annotations

from trainwright.accelerators.curves import Curve, curve_from, drawn_out
from trainwright.accelerators.machines import Machine, cluster_of, machine, machines
from trainwright.accelerators.roofline import estimate_profiles
from trainwright.accelerators.sheet import DataSheet, data_sheet, data_sheets, has_data_sheet

__all__ = [
    "Curve",
    "DataSheet",
    "Machine",
    "cluster_of",
    "curve_from",
    "data_sheet",
    "data_sheets",
    "drawn_out",
    "estimate_profiles",
    "has_data_sheet",
    "machine",
    "machines",
]
