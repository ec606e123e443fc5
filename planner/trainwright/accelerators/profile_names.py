"""Profiles found for a cluster's accelerators by data sheet, where files name one accelerator differently: T4, Tesla-T4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trainwright.accelerators.data_sheets import DataSheet, data_sheet, has_data_sheet
from trainwright.profiles import Profiles


def names_of_same_sheet(profiles: Profiles, accelerators: Iterable[str]) -> dict[str, str]:
    """Map accelerators without profiles to a profiled name of the same data sheet; to none where several have it."""
    profiled = {layer.accelerator for layer in profiles.layers} | {large.accelerator for large in profiles.too_large}
    by_sheet: dict[DataSheet, list[str]] = {}
    for name in sorted(profiled):
        if has_data_sheet(name):
            by_sheet.setdefault(data_sheet(name), []).append(name)
    profile_name: dict[str, str] = {}
    for name in accelerators:
        alike = by_sheet.get(data_sheet(name), []) if name not in profiled and has_data_sheet(name) else []
        if len(alike) == 1:
            profile_name[name] = alike[0]
    return profile_name


def with_names(profiles: Profiles, same: Mapping[str, str]) -> Profiles:
    """Return the profiles, in which each accelerator of `same` also has those of the name it is mapped to."""
    layers, too_large = list(profiles.layers), list(profiles.too_large)
    for name, profiled in same.items():
        layers += [replace(layer, accelerator=name) for layer in profiles.layers if layer.accelerator == profiled]
        too_large += [replace(large, accelerator=name) for large in profiles.too_large if large.accelerator == profiled]
    return replace(profiles, layers=tuple(layers), too_large=tuple(too_large))
