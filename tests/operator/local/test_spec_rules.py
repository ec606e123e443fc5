"""Rules of the definition in Python: all of its rules, each with its own words. The API server's verdicts are in tests/apiserver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainwright_operator.api.crd import openapi_schema
from trainwright_operator.api.spec_rules import RULES

SPEC = openapi_schema()["properties"]["spec"]


def stated(schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Yield place and CEL of the rules of a schema and its fields."""
    yield from ((place, rule["rule"]) for rule in schema.get("x-kubernetes-validations", ()))
    for name, field in schema.get("properties", {}).items():
        yield from stated(field, f"{place}.{name}".removeprefix("."))


def test_every_rule_of_the_definition_has_its_twin() -> None:
    """Rules about edits have nothing to compare with; models and texts are checked elsewhere, and what names a cluster's jobs is refused."""
    elsewhere = ("model", "job.", "trials.framework.")
    expected = {
        (place, cel)
        for place, cel in stated(SPEC)
        if "oldSelf" not in cel and not place.startswith(elsewhere) and "\\p{" not in cel
    }
    assert {(rule.place, rule.stated.cel) for rule in RULES} == expected
