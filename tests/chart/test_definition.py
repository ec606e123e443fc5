"""The CRD follows from the models and describes every field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, Field

from trainwright_operator.api import crd
from trainwright_operator.api.structural_schema import structural

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "charts" / "trainwright" / "files" / "trainingplans.yaml"


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema with its path; of opaque objects only their listed fields."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


SCHEMA = crd.openapi_schema()
FIELDS = [(path, node) for part in ("spec", "status") for path, node in nodes(SCHEMA["properties"][part], part)]


def test_the_committed_definition_is_the_generated_one() -> None:
    assert COMMITTED.read_text() == crd.crd_yaml(), "run `make generate`"


def test_every_field_says_what_it_is_for() -> None:
    silent = [
        path
        for path, node in FIELDS
        if not path.endswith("[]") and not node.get("description", "").endswith((".", "?"))
    ]
    assert not silent


def test_every_field_has_a_type_and_a_bound() -> None:
    """Without bounds the API server cannot estimate the cost of a rule, and one object could fill etcd."""
    unbounded = []
    for path, node in FIELDS:
        kind = node["type"]
        if node.get("x-kubernetes-preserve-unknown-fields") or "enum" in node or "format" in node:
            continue
        bounds = {"string": "maxLength", "array": "maxItems", "integer": "minimum"}
        if kind == "object" and "properties" not in node:
            bounds |= {"object": "maxProperties"}
        if path.startswith("spec") and kind in ("integer", "number"):
            bounds |= {kind: "maximum"}
        if kind in bounds and bounds[kind] not in node:
            unbounded.append(path)
    assert not unbounded


def test_every_rule_says_what_to_change_in_one_line() -> None:
    rules = [rule for _, node in [("", SCHEMA), *FIELDS] for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 10
    for rule in rules:
        assert "\n" not in rule["message"]
        assert any(mark in rule["message"] for mark in (";", "for example")), rule["message"]


class _Loose(BaseModel):
    """Shapes that pydantic writes and the API server drops or refuses."""

    pair: tuple[int, str]


class _Either(BaseModel):
    value: int | str


def test_schema_has_nothing_that_the_api_server_would_drop() -> None:
    with pytest.raises(ValueError, match=r"\.pair: the API server does not keep prefixItems"):
        structural(_Loose.model_json_schema())
    with pytest.raises(ValueError, match="a field may have one type"):
        structural(_Either.model_json_schema())


class _Inner(BaseModel):
    """Inner text."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    note: str | None = None


class _Outer(BaseModel):
    inner: Annotated[_Inner, Field(description="Outer text.")] = _Inner()


def test_references_nulls_and_exclusive_bounds_become_structural() -> None:
    inner = structural(_Outer.model_json_schema())["properties"]["inner"]
    assert inner["description"] == "Outer text."
    assert inner["default"] == {"share": 0.5}
    assert inner["properties"] == {
        "share": {
            "type": "number",
            "default": 0.5,
            "minimum": 0,
            "exclusiveMinimum": True,
            "maximum": 1,
            "exclusiveMaximum": True,
        },
        "note": {"type": "string"},
    }


def test_the_definition_is_plain_yaml_without_references() -> None:
    assert yaml.safe_load(crd.crd_yaml()) == crd.crd_manifest()
    assert "$ref" not in crd.crd_yaml()
    assert "&id" not in crd.crd_yaml()


def _defaults(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inside in value.items():
            yield from _defaults(f"{path}.{name}", inside)
    else:
        yield path


def test_no_new_field_of_the_spec_has_a_default_in_the_definition() -> None:
    """After a rollback a plan waits for each field in it that the definition lacks: it must hold only what somebody set.

    Fields of a new object without a default, such as a new family of models, may be added to the list.
    """
    known = (Path(__file__).parent / "fields_with_defaults.txt").read_text().split()
    spec = [(path, node) for path, node in FIELDS if path.startswith("spec") and "default" in node]
    found = {field for path, node in spec for field in _defaults(path, node["default"])}
    assert sorted(found) == known, "use `without_default`; the model supplies the value"
