"""Names of families and of their fields in `spec.model` of a TrainingPlan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic.alias_generators import to_camel

_WORDS: Final[Mapping[str, str]] = {"wide_resnet": "wide_res_net"}
"""Words of a family's tag, where these are more than the tag has."""


def spec_field(name: str) -> str:
    """Return the name in Python of a family's or a field's part of a spec, by the planner's name."""
    return _WORDS.get(name, name)


def resource_name(name: str) -> str:
    """Return the same name as the resource has it."""
    return to_camel(spec_field(name))


def in_resource_names(value: Any) -> Any:
    """Return plain data with its keys named as in the resource; names among the values, as of layers, stay."""
    if isinstance(value, Mapping):
        return {resource_name(key): in_resource_names(item) for key, item in value.items()}
    return [in_resource_names(item) for item in value] if isinstance(value, list) else value
