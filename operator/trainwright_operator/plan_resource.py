"""Conversion of a TrainingPlan as the API server shows it to facts, without control characters in any text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from trainwright.outside.plain_text import plain_line, without_controls
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.snapshot import PlanFacts

_AS_WRITTEN: Final = ("podTemplate", "command")
"""Fields of the spec that programs read: what the acceptance and the definition let through reaches them unchanged."""


def plan_facts(resource: dict[str, Any], default_image: str) -> PlanFacts:
    """Convert a TrainingPlan. A spec that this version cannot read, since the definition is newer, becomes `spec_error`."""
    meta = resource["metadata"]
    spec, spec_error = None, ""
    try:
        spec = TrainingPlanSpec.model_validate(without_controls(resource.get("spec") or {}, except_under=_AS_WRITTEN))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        spec_error = plain_line(f"spec.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")
    return PlanFacts(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta.get("generation", 1),
        created_at=parse_time(meta["creationTimestamp"]),
        spec=spec,
        status=_readable_status(without_controls(resource.get("status") or {})),
        image=(spec.worker.image if spec else None) or default_image,
        annotations=without_controls(meta.get("annotations") or {}),
        spec_error=spec_error,
        hidden_fields=hidden_fields(resource),
        resource_version=meta.get("resourceVersion", ""),
    )


def _readable_status(status: dict[str, Any]) -> TrainingPlanStatus:
    """Convert a status without the fields and entries that this version cannot read; they are rebuilt from the cluster."""
    kept = dict(status)
    try:
        return TrainingPlanStatus.model_validate(kept)
    except ValidationError as error:
        unreadable = {error["loc"][:2] for error in error.errors(include_url=False)}
    for field in {str(place[0]) for place in unreadable}:
        value = kept.pop(field, None)
        numbers = {place[1] for place in unreadable if place[0] == field and len(place) > 1}
        if isinstance(value, list) and all(isinstance(number, int) for number in numbers):
            kept[field] = [entry for number, entry in enumerate(value) if number not in numbers]
    try:
        return TrainingPlanStatus.model_validate(kept)
    except ValidationError:
        return TrainingPlanStatus()


def hidden_fields(resource: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields of the spec that somebody set and the API server does not show: its definition is older than they.

    Only `managedFields` still tells of them.
    """
    entries = resource["metadata"].get("managedFields") or []
    specs = [(entry.get("fieldsV1") or {}).get("f:spec") or {} for entry in entries if not entry.get("subresource")]
    paths = (path for spec in specs for path in _unknown_fields(spec, TrainingPlanSpec, "spec"))
    shown = resource.get("spec") or {}
    return tuple(sorted({path for path in paths if not _has(shown, path.split(".")[1:])}))


def _unknown_fields(managed: dict[str, Any], model: type[BaseModel], place: str) -> Iterator[str]:
    """Return the managed fields that the model lacks; objects without a model of their own may hold anything."""
    annotations_by_name = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, inside in managed.items():
        prefix, _, name = key.partition(":")
        if prefix != "f":
            continue
        if name not in annotations_by_name:
            yield f"{place}.{name}"
        nested = [
            annotation
            for annotation in (annotations_by_name.get(name), *get_args(annotations_by_name.get(name)))
            if isinstance(annotation, type)
        ]
        for value in nested:
            if issubclass(value, BaseModel):
                yield from _unknown_fields(inside, value, f"{place}.{name}")


def _has(value: Any, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def parse_time(text: str) -> datetime:
    """Parse an API timestamp."""
    return datetime.fromisoformat(text).astimezone(UTC)
