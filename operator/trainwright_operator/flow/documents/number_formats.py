"""Number formats of a plan: the one that its spec names, or those that may give the fastest plan on the devices found."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from trainwright.accelerators import FormatChoice, format_choices
from trainwright.exports import TARGETS
from trainwright.families import Family
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright_operator.api.spec import AUTO, TrainingPlanSpec
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices


def model_from_spec(spec: TrainingPlanSpec, dtype: Dtype | None = None) -> Model:
    """Return the model of the spec in a number format, by default in that of the spec. Raise ValueError if it is invalid."""
    return _model_of(spec.model.family, Dtype(spec.training.dtype) if dtype is None else dtype)


@lru_cache(maxsize=64)
def _model_of(family: Family, dtype: Dtype) -> Model:
    """Return the model; every pass over a plan asks for it several times."""
    return Model.of(family, dtype)


def formats_to_profile(spec: TrainingPlanSpec, discovery: DiscoveredDevices) -> tuple[FormatChoice, ...]:
    """Return the formats to profile and search, each with its accelerators; `auto` names those that may win."""
    accelerators = tuple(dict.fromkeys(node.accelerator for node in discovery.nodes))
    if spec.training.dtype != AUTO:
        return (FormatChoice(Dtype(spec.training.dtype), accelerators),)
    trainer_formats = _formats_of_trainer(spec)
    stored = tuple(choice for choice in discovery.formats if choice.dtype in trainer_formats)
    return stored if stored == discovery.formats != () else format_choices(accelerators, trainer_formats)


def check_format(spec: TrainingPlanSpec) -> None:
    """Raise ValueError for a number format that the trainer of search.expressibleBy lacks."""
    trainer_formats, dtype = _formats_of_trainer(spec), spec.training.dtype
    if spec.search.expressible_by is not None and dtype != AUTO and Dtype(dtype) not in trainer_formats:
        raise ValueError(
            f"training.dtype: {spec.search.expressible_by} (search.expressibleBy) has {' and '.join(sorted(trainer_formats))}, got "
            f"{dtype}; set one of these, or auto"
        )


def _formats_of_trainer(spec: TrainingPlanSpec) -> frozenset[Dtype]:
    """Return the formats of the trainer that has to run the plans; all without one."""
    trainer = spec.search.expressible_by
    return frozenset(Dtype) if trainer is None else TARGETS[trainer.target].capabilities.dtypes


def with_formats(discovery: DiscoveredDevices, spec: TrainingPlanSpec) -> DiscoveredDevices:
    """Return the discovery with the formats that `auto` names on its devices."""
    is_open = spec.training.dtype == AUTO
    return replace(discovery, formats=formats_to_profile(spec, discovery)) if is_open else discovery
