"""Number formats of a plan: the one that its spec names, or those that may give the fastest plan on the devices found."""

from __future__ import annotations

from dataclasses import replace

from trainwright.accelerators import FormatChoice, format_choices
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright_operator.api.spec import AUTO, TrainingPlanSpec
from trainwright_operator.flow.discovered_devices import DiscoveredDevices


def model_from_spec(spec: TrainingPlanSpec, dtype: Dtype | None = None) -> Model:
    """Return the model of the spec in a number format, by default in that of the spec. Raise ValueError if it is invalid."""
    return Model.of(spec.model.family(), Dtype(spec.training.dtype) if dtype is None else dtype)


def formats_to_profile(spec: TrainingPlanSpec, discovery: DiscoveredDevices) -> tuple[FormatChoice, ...]:
    """Return the formats to profile and search, each with its accelerators; `auto` names those that may win."""
    accelerators = tuple(dict.fromkeys(node.accelerator for node in discovery.nodes))
    if spec.training.dtype == AUTO:
        return discovery.formats or format_choices(accelerators)
    return (FormatChoice(Dtype(spec.training.dtype), accelerators),)


def with_formats(discovery: DiscoveredDevices, spec: TrainingPlanSpec) -> DiscoveredDevices:
    """Return the discovery with the formats that `auto` names on its devices."""
    is_open = spec.training.dtype == AUTO
    return replace(discovery, formats=formats_to_profile(spec, discovery)) if is_open else discovery
