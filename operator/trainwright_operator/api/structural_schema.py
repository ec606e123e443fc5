"""Conversion of pydantic's JSON schema to the structural schema of a CustomResourceDefinition.

The API server refuses some of pydantic's keywords (`$ref`, null types, numeric exclusive bounds), which are rewritten
here, and silently drops others (`const`, `prefixItems`), so unknown keywords are refused.
"""

from __future__ import annotations

from typing import Any, Final

from trainwright_operator.api.base import VALIDATIONS

Schema = dict[str, Any]

_EXTENSION: Final = "x-kubernetes-"
_DROPPED: Final = frozenset({"title", "readOnly", "$defs"})
_ORDER: Final = (
    *("description", "type", "format", "default", "enum", "pattern", "minLength", "maxLength"),
    *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "required", "properties", "items", "additionalProperties"),
)
"""Keywords that the API server keeps, in output order."""


def structural(schema: Schema) -> Schema:
    """Return the structural form of a pydantic model's schema. Raise ValueError on a keyword that would be dropped."""
    return _node(schema, schema.get("$defs", {}), path="")


def _node(node: Schema, definitions: dict[str, Schema], path: str) -> Schema:
    node = _with_rewritten_keywords(_without_null(_inlined(node, definitions), definitions))
    unknown = [key for key in node if key not in _ORDER and key not in _DROPPED and not key.startswith(_EXTENSION)]
    if unknown:
        raise ValueError(
            f"{path or 'the schema'}: the API server does not keep {unknown[0]}; write the field without it"
        )
    result = {key: node[key] for key in sorted(node, key=_place) if key not in _DROPPED}
    if "properties" in result:
        children: dict[str, Schema] = result["properties"]
        result["properties"] = {name: _node(child, definitions, f"{path}.{name}") for name, child in children.items()}
    for key in ("items", "additionalProperties"):
        if key in result:
            result[key] = _node(result[key], definitions, f"{path}.{key}")
    return result


def _place(key: str) -> tuple[int, str]:
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


def _with_rewritten_keywords(node: Schema) -> Schema:
    node = dict(node)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node:
            node |= {bound: node[exclusive], exclusive: True}
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "default" in node:
        # Keep the whole default although the members have the same ones: the rules are checked against it.
        node["default"] = _without_nulls(node["default"])
    if isinstance(node.get("additionalProperties"), bool) or node.get(f"{_EXTENSION}preserve-unknown-fields"):
        node.pop("additionalProperties", None)  # false is what pruning does, true what an open object means
    return node


def _inlined(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Replace a reference by its target; own keywords win, validation rules are joined."""
    if "$ref" not in node:
        return node
    target = _inlined(definitions[node["$ref"].removeprefix("#/$defs/")], definitions)
    own = {key: value for key, value in node.items() if key != "$ref"}
    merged = {**target, **own}
    if VALIDATIONS in target and VALIDATIONS in own:
        merged[VALIDATIONS] = [*target[VALIDATIONS], *own[VALIDATIONS]]
    return merged


def _without_null(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Drop the null type of an optional field, which is absent instead."""
    if "anyOf" not in node:
        return node
    members = [member for member in node["anyOf"] if member != {"type": "null"}]
    if len(members) != 1:
        raise ValueError(f"a field may have one type, or one and null, got {node['anyOf']}")
    outer = {key: value for key, value in node.items() if key != "anyOf"}
    if outer.get("default", ...) is None:
        del outer["default"]
    return {**_inlined(members[0], definitions), **outer}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
