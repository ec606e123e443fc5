"""JSON schemas of all documents, published, exchanged and stored, without what follows class names and docstrings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import subjects as s

FILE = Path(__file__).with_name("schemas.json")
WORDS = ("title", "description")


def record() -> dict[str, Any]:
    """Return the schemas by name: for a published document that of the command line, else its kind."""
    published = {name: s.documents.schema(noun) for name, noun in s.PUBLISHED_DOCUMENTS.items()}
    wire = [s.documents.schema(noun) for noun in s.WIRE_DOCUMENTS]
    by_name = published | {schema["properties"]["document"]["const"]: schema for schema in wire}
    return {name: without_class_names(schema) for name, schema in by_name.items()}


def without_class_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its definitions numbered in the order of their use, and without titles and descriptions."""
    definitions, order = schema.get("$defs", {}), []

    def visit(value: Any, *, is_properties: bool = False) -> Any:
        if isinstance(value, list):
            return [visit(member) for member in value]
        if not isinstance(value, dict):
            return value
        found = {}
        for key, member in value.items():
            if key in WORDS and not is_properties and isinstance(member, str):
                continue
            if key == "$ref":
                name = member.removeprefix("#/$defs/")
                if name not in order:
                    order.append(name)
                found[key] = f"#/$defs/{order.index(name)}"
            else:
                found[key] = visit(member, is_properties=key == "properties" and not is_properties)
        return found

    top = visit({key: value for key, value in schema.items() if key != "$defs"})
    numbered: dict[str, Any] = {}
    for name in order:  # grows while definitions refer to others
        numbered[str(len(numbered))] = visit(definitions[name])
    if unused := set(definitions) - set(order):
        raise ValueError(f"definitions that nothing refers to: {', '.join(sorted(unused))}")
    return {**top, "$defs": numbered} if numbered else top


def text(schemas: dict[str, Any]) -> str:
    """Return the file's text."""
    lines = [f"{json.dumps(name)}: {json.dumps(schema, separators=(',', ':'))}" for name, schema in schemas.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def stored() -> dict[str, Any]:
    """Return the schemas of the file."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found
