"""TrainingPlan of a file, read for this machine; what only a cluster can do is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from trainwright.layer import Dtype
from trainwright.outside.plain_text import find_control, plain_line
from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.api.frameworks import Apply
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.spec_rules import check_name, check_rules
from trainwright_operator.flow.documents.number_formats import check_format, model_from_spec

_MAX_BYTES: Final = 1_500_000
"""Size above which the API server would not take the manifest either."""
_TRIALS_PER_GANG: Final = 8
"""Trials that share a gang where the spec does not say, since starting one takes longer than most trials."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """TrainingPlan of a file.

    Attributes:
        identity: text that changes with the spec.
        source: its file.
    """

    name: str
    spec: TrainingPlanSpec
    annotations: Mapping[str, str]
    identity: str
    source: Path


def read_manifest(path: Path) -> Manifest:
    """Return the TrainingPlan of a file. Raise ValueError with what is wrong with it."""
    try:
        return _parse(_read_document(path.read_text(encoding="utf-8")), path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not YAML: it is no text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {plain_line(str(error))}") from None


def _read_document(text: str) -> dict[str, Any]:
    """Return the only document of a text, a TrainingPlan of this version."""
    if len(text.encode()) > _MAX_BYTES:
        raise ValueError(f"a manifest has at most {_MAX_BYTES:,} bytes")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from None
    if len(documents) != 1:
        raise ValueError(f"holds {len(documents)} documents; tune takes one TrainingPlan at a time")
    document = documents[0]
    if not isinstance(document, dict) or document.get("kind") != KIND:
        shown = document.get("kind") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"expected a {KIND} (kind: {KIND}), got {shown}")
    if document.get("apiVersion") != API_VERSION:
        raise ValueError(f"apiVersion: expected {API_VERSION}, got {document.get('apiVersion')}")
    return document


def _parse(document: Mapping[str, Any], source: Path) -> Manifest:
    control = find_control(document)
    if control is not None:
        raise ValueError(f"{control[0]}: holds the control or invisible character {control[1]}; remove it")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise ValueError("metadata: missing")  # noqa: TRY004 - one kind of error for what a file says
    name = metadata.get("name")
    check_name(name)
    annotations = metadata.get("annotations") or {}
    spec = document.get("spec")
    if not isinstance(spec, dict):
        raise ValueError("spec: missing")  # noqa: TRY004 - one kind of error for what a file says
    parsed = _parse_spec(spec)
    _refuse_cluster_fields(parsed)
    _check_whole(parsed)
    identity = json.dumps([spec, annotations], sort_keys=True, default=str)
    texts = {str(key): str(text) for key, text in annotations.items()}
    return Manifest(str(name), _with_series(parsed), texts, identity, source)


def _parse_spec(spec: Mapping[str, Any]) -> TrainingPlanSpec:
    try:
        return TrainingPlanSpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("spec", *first["loc"])))
        words = "no such field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}: {words}") from None


def _check_whole(spec: TrainingPlanSpec) -> None:
    """Raise ValueError for fields that do not go together, which an API server or the first pass would refuse."""
    check_rules(spec)
    model_from_spec(spec, Dtype.FLOAT32)
    check_format(spec)


def _refuse_cluster_fields(spec: TrainingPlanSpec) -> None:
    """Raise ValueError for a field that asks for what only a cluster has."""
    refusals = {
        "queueName": spec.queue_name is not None,
        "trials.framework": spec.trials.framework is not None,
        "devices.nodeSelector": bool(spec.devices.node_selector),
    }
    for field, is_set in refusals.items():
        if is_set:
            raise ValueError(f"spec.{field}: only a cluster has that; leave it out, or use kubectl apply")
    if spec.apply is not Apply.NEVER:
        raise ValueError(
            f"spec.apply: {spec.apply} hands the winner to a cluster; leave it out, and start winner/launch.sh yourself"
        )
    if spec.suspend:
        raise ValueError("spec.suspend: is true, so there is nothing to do; leave it out")


def _with_series(spec: TrainingPlanSpec) -> TrainingPlanSpec:
    """Return the spec with several trials in a gang, unless it says how many."""
    if "per_gang" in spec.trials.model_fields_set:
        return spec
    trials = spec.trials.model_copy(update={"per_gang": _TRIALS_PER_GANG})
    return spec.model_copy(update={"trials": trials})
