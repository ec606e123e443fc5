"""Dataclasses whose documents write the fields of a part in its place, where the part is marked FLAT.

Fields without a default come first in the document, then those with one, each in the order of the classes.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, field, fields, make_dataclass
from functools import cache
from inspect import cleandoc
from typing import Any, get_type_hints

from pydantic import ConfigDict, GetCoreSchemaHandler, SerializerFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

from trainwright.bounds import FLAT

DOCUMENT_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)


@cache
def parts(noun: Any) -> dict[str, type]:
    """Return the parts that a dataclass's documents write flat, by the field's name."""
    hints = get_type_hints(noun, include_extras=True)
    return {name: hint.__origin__ for name, hint in hints.items() if FLAT in getattr(hint, "__metadata__", ())}


def field_types(noun: type) -> dict[str, Any]:
    """Return the types of a document's fields by name, in their order."""
    return {member.name: get_type_hints(owner)[member.name] for owner, member in _document_fields(noun)}


def field_values(value: Any) -> dict[str, Any]:
    """Return the values of the fields that the document of a dataclass has, by name."""
    noun: Any = type(value)
    flat = parts(noun)
    values: dict[str, Any] = {}
    for name in (inner.name for inner in fields(value)):
        member = getattr(value, name)
        if name in flat:
            values |= {inner.name: getattr(member, inner.name) for inner in fields(member)}
        else:
            values[name] = member
    return values


def write_flat(noun: Any) -> None:
    """Let pydantic read and write a dataclass's documents with its parts in place, if it has any."""
    if not parts(noun):
        return
    twin = _flat_twin(noun)

    def read(flat: Any) -> Any:
        return noun(**{member.name: _member(member, flat, noun) for member in fields(noun)})

    def write(value: Any, handler: SerializerFunctionWrapHandler) -> Any:
        return handler(twin(**field_values(value)))

    def make_schema(_: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler.generate_schema(twin)
        serializer = core_schema.wrap_serializer_function_ser_schema(write, schema=schema)
        return core_schema.no_info_after_validator_function(read, schema, serialization=serializer)

    noun.__get_pydantic_core_schema__ = staticmethod(make_schema)


def _member(member: Field[Any], flat: Any, noun: type) -> Any:
    part: Any = parts(noun).get(member.name)
    if part is None:
        return getattr(flat, member.name)
    return part(**{inner.name: getattr(flat, inner.name) for inner in fields(part)})


@cache
def _document_fields(noun: Any) -> tuple[tuple[type, Field[Any]], ...]:
    """Return the fields that the document has, each with the dataclass that declares it."""
    flat: dict[str, Any] = parts(noun)
    members: list[tuple[type, Field[Any]]] = []
    for member in fields(noun):
        part: Any = flat.get(member.name)
        members += [(noun, member)] if part is None else [(part, inner) for inner in fields(part)]
    return tuple(sorted(members, key=lambda pair: pair[1].default is not MISSING)) if flat else tuple(members)


def _flat_twin(noun: type) -> type:
    """Return a dataclass of the same name with the fields that the document has."""
    twin = make_dataclass(
        noun.__name__,
        [
            (member.name, get_type_hints(owner, include_extras=True)[member.name], field(default=member.default))
            for owner, member in _document_fields(noun)
        ],
        namespace={"__doc__": _described(noun), "__pydantic_config__": DOCUMENT_CONFIG},
    )
    twin.__module__, twin.__qualname__ = noun.__module__, noun.__qualname__
    return twin


def _described(noun: type) -> str:
    """Return the docstring with the attributes of each part in place of the part."""
    flat, lines = parts(noun), []
    for line in cleandoc(noun.__doc__ or "").splitlines():
        part = flat.get(line.strip().partition(":")[0])
        lines += cleandoc(part.__doc__ or "").partition("Attributes:\n")[2].splitlines() if part else [line]
    return "\n".join(lines)
