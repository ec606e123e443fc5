"""The border: documents (YAML or JSON) to nouns and back, with errors that name the field and what is wrong there."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

VERSION = "trainwright.dev/v1alpha1"
LARGEST_NUMBER = 1e24
"""Beyond any size, rate or time there is; up to here no cost overflows."""


class DocumentError(ValueError):
    """A document that cannot be used; the message is one sentence for the person who wrote it."""


_WORDS = {
    "tuple_type": "expected a list",
    "dataclass_type": "expected a mapping",
    "unexpected_keyword_argument": "there is no such field",
}
"""What is wrong, by pydantic's name for it, where its own words are about Python."""

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(noun: Any) -> TypeAdapter[Any]:
    """The pydantic adapter of a frozen dataclass (or a union of them), made once; unknown fields are refused."""
    if noun not in _ADAPTERS:
        _forbid_unknown_fields(noun)
        _ADAPTERS[noun] = TypeAdapter(noun)
    return _ADAPTERS[noun]


def _forbid_unknown_fields(noun: Any) -> None:
    """Pydantic reads its configuration from each dataclass by itself; a parent's does not reach its fields' types."""
    if is_dataclass(noun) and isinstance(noun, type):
        if "__pydantic_config__" in vars(noun):
            return
        noun.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
        members = tuple(get_type_hints(noun).values())
    else:
        members = get_args(noun)
    for member in members:
        _forbid_unknown_fields(member)


def dump(noun: object) -> dict[str, Any]:
    """The document of a noun as plain data, with its `apiVersion` and `document` (its kind)."""
    body = adapter(type(noun)).dump_python(noun, mode="json")
    return {"apiVersion": VERSION, "document": type(noun).__name__, **body}


def dumps(noun: object) -> str:
    """The document of a noun as one line of JSON."""
    return json.dumps(dump(noun), separators=(",", ":"), ensure_ascii=False)


def parse(data: Any, noun: Any, *, source: str = "document") -> Any:
    """The noun that plain data describes. Raises DocumentError with one sentence on the first thing that is wrong."""
    if not isinstance(data, dict):
        raise DocumentError(f"{source}: expected a mapping at the top, got {type(data).__name__}")
    body = {key: value for key, value in data.items() if key not in ("apiVersion", "document")}
    version = data.get("apiVersion", VERSION)
    if version != VERSION:
        raise DocumentError(f"{source}: apiVersion {_shown(version)} is not known here; this version reads {VERSION!r}")
    kinds = {member.__name__: member for member in get_args(noun) or (noun,)}
    document = data.get("document", next(iter(kinds)))
    if not isinstance(document, str) or document not in kinds:
        raise DocumentError(f"{source}: expected a document of kind {' or '.join(kinds)}, got {_shown(document)}")
    try:
        found = adapter(kinds[document]).validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = _WORDS.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise DocumentError(f"{source}: {where + ': ' if where else ''}{what}") from None
    place = _too_large(found, "")
    if place is not None:
        raise DocumentError(f"{source}: {place}: larger than any number here can be ({LARGEST_NUMBER:g})")
    return found


def _shown(value: Any) -> str:
    """A value in an error message: a few lines of YAML can stand for gigabytes of lists."""
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _too_large(value: Any, where: str) -> str | None:
    """Where the first number beyond LARGEST_NUMBER stands, or None."""
    members: list[tuple[str, Any]] = []
    if isinstance(value, int | float):
        return where if abs(value) > LARGEST_NUMBER else None
    if is_dataclass(value):
        members = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, tuple):
        members = [(str(number), member) for number, member in enumerate(value)]
    for name, member in members:
        found = _too_large(member, f"{where}.{name}" if where else name)
        if found is not None:
            return found
    return None


def loads(text: str | bytes, noun: Any, *, source: str = "document") -> Any:
    """The noun that a YAML or JSON text describes. Raises DocumentError with one sentence."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = _load_yaml(text, source)
    return parse(data, noun, source=source)


def _load_yaml(text: str | bytes, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise DocumentError(f"{source}: neither YAML nor JSON: {problem}") from None


def schema(noun: Any) -> dict[str, Any]:
    """The JSON schema of a noun's document, `apiVersion` and `document` included, which may be left out."""
    found = adapter(noun).json_schema()
    head = {"apiVersion": {"const": VERSION}, "document": {"const": noun.__name__}}
    return {**found, "properties": {**head, **found["properties"]}}
