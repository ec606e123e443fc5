"""Conversion of documents (YAML or JSON) to nouns (frozen dataclasses) and back, with errors that name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trainwright.document_kind import KINDS, TAKEN_BY, kind_by_fields, kind_of
from trainwright.flat_parts import DOCUMENT_CONFIG, field_types, field_values, write_flat
from trainwright.outside.plain_data import plain_data
from trainwright.outside.plain_text import find_control, may_hold_controls
from trainwright.quantity import expected_quantity

VERSION = "trainwright.dev/v1alpha1"
LARGEST_NUMBER = 1e24
"""Maximum of any number, above every real size, rate or time; up to it no cost overflows."""


class DocumentError(ValueError):
    """Document that cannot be used; the message is one sentence for its author.

    Attributes:
        needs_newer_version: whether it holds a kind, a field or a word that only a newer version can know.
    """

    def __init__(self, sentence: str, *, needs_newer_version: bool = False) -> None:
        super().__init__(sentence)
        self.needs_newer_version = needs_newer_version


_WORDS = {
    "tuple_type": "expected a list",
    "dataclass_type": "expected a mapping",
    "missing": "Field required: add it",
    "unexpected_keyword_argument": "there is no such field",
    "too_short": "expected at least one entry, got an empty list",
    "string_type": "expected a text",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
}
"""Messages by pydantic's error type, where its own message is about Python."""

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
"""Words of a number's bound, by pydantic's name of it."""

_SHOWS_VALUE = {"string_type", "bool_type", "bool_parsing", "enum", "literal_error"}
"""Pydantic's error types whose message lacks the value."""

_UNKNOWN_HERE = {"unexpected_keyword_argument", "enum", "literal_error"}
"""Pydantic's error types for what a newer version may have added."""

_NUMBERS = {
    "int_parsing",
    "int_type",
    "int_from_float",
    "int_parsing_size",
    "float_parsing",
    "float_type",
    "finite_number",
}
"""Pydantic's error types for a value that should be a number."""

_FORMATS = {
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "single", "full"), "float32"),
}
"""Number formats by other names of them."""

LONGEST_CHOICE = 40
"""Letters of a value that are compared with the choices for it."""

_KINDS = {type(None): "nothing", list: "a list"}
"""Descriptions of a text's top value that is no mapping."""

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(noun: Any) -> TypeAdapter[Any]:
    """Return the cached pydantic adapter of a frozen dataclass (or a union of them), which refuses unknown fields."""
    if noun not in _ADAPTERS:
        _forbid_unknown_fields(noun)
        _ADAPTERS[noun] = TypeAdapter(noun)
    return _ADAPTERS[noun]


def _forbid_unknown_fields(noun: Any) -> None:
    """Configure every dataclass by itself: pydantic does not pass a parent's configuration to its fields' types."""
    if is_dataclass(noun) and isinstance(noun, type):
        if "__pydantic_config__" in vars(noun):
            return
        noun.__pydantic_config__ = DOCUMENT_CONFIG  # type: ignore[attr-defined]
        write_flat(noun)
        members = tuple(field_types(noun).values())
    else:
        members = get_args(noun)
    for member in members:
        _forbid_unknown_fields(member)


def dump(noun: object) -> dict[str, Any]:
    """Return a noun's document as plain data, with its `apiVersion` and `document` (its kind)."""
    body = adapter(type(noun)).dump_python(noun, mode="json")
    return {"apiVersion": VERSION, "document": kind_of(type(noun)), **body}


def dumps(noun: object) -> str:
    """Return a noun's document as one line of JSON."""
    return json.dumps(dump(noun), separators=(",", ":"), ensure_ascii=False)


def parse(data: Any, noun: Any, *, source: str = "document", absent: Mapping[str, Any] | None = None) -> Any:
    """Build the noun that plain data describes; `absent` gives the fields that it lacks.

    Raises DocumentError with one sentence on the first thing that is wrong.
    """
    if not isinstance(data, dict):
        raise DocumentError(f"{source}: expected a mapping at the top, got {_KINDS.get(type(data), 'one value')}")
    body = {**(absent or {}), **{key: value for key, value in data.items() if key not in ("apiVersion", "document")}}
    version = data.get("apiVersion", VERSION)
    if version != VERSION:
        sentence = f"{source}: expected apiVersion {VERSION!r}, got {_shown(version)}"
        raise DocumentError(sentence, needs_newer_version=isinstance(version, str))
    if data.get("kind") == "TrainingPlan":
        raise DocumentError(
            f"{source}: expected a document of the planner, got a TrainingPlan, which the operator reads; "
            "`trainwright schema` lists the planner's documents"
        )
    kinds = {kind_of(member): member for member in get_args(noun) or (noun,)}
    if "candidates" in data and "Plan" in kinds:
        raise DocumentError(
            f"{source}: expected one plan, got the candidates of `trainwright plan`; give what is under "
            "candidates[0].plan, or write the best plan with --write-plan"
        )
    document = _validated(body, kinds[_kind(data, kinds, source)], source)
    _refuse_large_numbers(document, source)
    if _holds_truth(body):  # most documents do not, and this looks faster than beside the fields
        _refuse_truth_for_number(body, document, source, "")
    return document


def _kind(data: Mapping[Any, Any], kinds: Mapping[str, type], source: str) -> str:
    """Return the document's kind, by default the first. Raises DocumentError for another, whether it is named or not."""
    expected = f"{source}: expected a document of kind {' or '.join(kinds)}"
    names = {field.name for noun in kinds.values() for field in fields(noun)}
    document = data.get("document", next(iter(kinds)))
    is_kind = isinstance(document, str)
    if not is_kind or document not in kinds:
        taken = f", which {TAKEN_BY[document]} takes" if is_kind and document in TAKEN_BY else ""
        sentence = f"{expected}, got {_shown(document)}{taken}"
        raise DocumentError(sentence, needs_newer_version=is_kind and document not in KINDS.values())
    if "document" in data:
        return str(document)
    named = data.get("kind") if "kind" not in names else None
    is_named = isinstance(named, str)
    if is_named and named in kinds:
        raise DocumentError(f"{source}: kind: there is no such field; write document: {named}, or leave it out")
    other = named if is_named and named in TAKEN_BY else kind_by_fields(set(data) - {"apiVersion"}, names)
    if other is not None:
        raise DocumentError(f"{expected}, got one of kind {other}, which {TAKEN_BY[other]} takes")
    return str(document)


def _validated(body: dict[Any, Any], noun: Any, source: str) -> Any:
    try:
        _refuse_large_numbers(body, source)
        return adapter(noun).validate_python({key: _strip_document_headers(value) for key, value in body.items()})
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = _most_specific_error(errors)
        where, what = ".".join(_plain(part) for part in first["loc"]), _what(first, noun)
        message = what if not where or what.startswith(f"{where}.") else f"{where}: {what}"
        is_unknown = any(each["type"] in _UNKNOWN_HERE and isinstance(each["loc"][-1], str) for each in errors)
        raise DocumentError(f"{source}: {message}", needs_newer_version=is_unknown) from None
    except RecursionError:
        raise DocumentError(f"{source}: nested too deeply; flatten it") from None
    except (ArithmeticError, MemoryError) as error:
        raise DocumentError(f"{source}: a number is too large ({error})") from None


def _plain(name: int | str) -> str:
    """Escape a name that is not printable, so that an error message stays one line."""
    return str(name) if str(name).isprintable() else repr(name)


def _what(error: ErrorDetails, noun: Any) -> str:
    """Say what is wrong, and what to write in its place."""
    if error["type"] in _NUMBERS:
        return expected_quantity(str(error["loc"][-1]), error["input"], whole=error["type"].startswith("int"))
    bounds = {words: error["ctx"][name] for name, words in _BOUNDS.items() if name in error.get("ctx", {})}
    if bounds:
        words, bound = bounds.popitem()
        return f"must be {words} {f'{bound:g}' if isinstance(bound, float) else bound}, got {error['input']}"
    what = _WORDS.get(error["type"], error["msg"].removeprefix("Value error, ").replace("Input should be", "expected"))
    if error["type"] == "unexpected_keyword_argument":
        name, field_names = str(error["loc"][-1]), _fields_at(noun, error["loc"][:-1])
        close = get_close_matches(name, field_names, n=1) or [
            field for field in field_names if field.startswith(f"{name}_")
        ]
        what += (
            f"; did you mean {close[0]}?" if close else f"; there are {', '.join(field_names)}" if field_names else ""
        )
    if error["type"] in _SHOWS_VALUE:
        what += f", got {_shown(error['input'])}{_choice_meant(error)}"
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        what += "; put it between quotes"
    return what


def wrong_value(error: ValidationError, name: str) -> str:
    """Say what is wrong with a value outside of a document, such as that of an option; its name tells the unit."""
    return _what({**error.errors(include_url=False)[0], "loc": (name,)}, None)


def _choice_meant(error: ErrorDetails) -> str:
    """Return `; write float16` for a choice that has another name here, or nearly this one; empty if there is none."""
    written = error["input"]
    if not isinstance(written, str):
        return ""
    choices = re.findall("'([^']+)'", str(error.get("ctx", {}).get("expected", "")))
    given = written[:LONGEST_CHOICE].lower().removeprefix("torch.")
    near = get_close_matches(given, choices, n=1, cutoff=0.85)
    meant = [choice for choice in (_FORMATS.get(given), *near) if choice in choices]
    return f"; write {meant[0]}" if meant else ""


def _most_specific_error(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the first error; for a missing field, the unknown field that was written in its place, if any."""
    first = errors[0]
    if first["type"] == "missing":
        written = [
            error
            for error in errors
            if error["type"] == "unexpected_keyword_argument" and error["loc"][:-1] == first["loc"][:-1]
        ]
        return written[0] if written else first
    return first


def _strip_document_headers(value: Any) -> Any:
    """Drop the headers of documents within a document (a plan among trials)."""
    if isinstance(value, list):
        return [_strip_document_headers(member) for member in value]
    if not isinstance(value, dict):
        return value
    has_head = value.get("apiVersion") == VERSION and isinstance(value.get("document"), str)
    return {
        key: _strip_document_headers(member)
        for key, member in value.items()
        if not (has_head and key in ("apiVersion", "document"))
    }


def _fields_at(noun: Any, path: tuple[int | str, ...]) -> list[str]:
    """List the fields that a document has at a path, as far as its type determines them."""
    reached = [noun]
    for part in path:
        options = [option for kind in reached for option in (kind, *get_args(kind))]
        hints = [field_types(option) for option in options if is_dataclass(option) and isinstance(option, type)]
        named = [hint[part] for hint in hints if isinstance(part, str) and part in hint]
        reached = named or [argument for option in options for argument in get_args(option)]
    options = [option for kind in reached for option in (kind, *get_args(kind))]
    return [
        name for option in options if isinstance(option, type) and is_dataclass(option) for name in field_types(option)
    ]


def _holds_truth(written: Any) -> bool:
    """Return whether true or false is written anywhere."""
    if isinstance(written, dict):
        return any(map(_holds_truth, written.values()))
    return any(map(_holds_truth, written)) if isinstance(written, list) else isinstance(written, bool)


def _refuse_truth_for_number(written: Any, validated: Any, source: str, where: str) -> None:
    """Raise DocumentError where a number was written as true or false, which pydantic reads as 1 or 0."""
    if isinstance(written, bool) and isinstance(validated, int | float) and not isinstance(validated, bool):
        raise DocumentError(f"{source}: {where}: expected a number, got {str(written).lower()}; write the number")
    if isinstance(written, dict) and is_dataclass(validated):
        values = field_values(validated)
        for name, value in written.items():
            _refuse_truth_for_number(value, values.get(name), source, f"{where}.{name}" if where else name)
    elif isinstance(written, list) and isinstance(validated, tuple):
        for number, (value, member) in enumerate(zip(written, validated, strict=False)):
            _refuse_truth_for_number(value, member, source, f"{where}.{number}")


def _refuse_large_numbers(value: Any, source: str) -> None:
    if _holds_large_number(value):
        place = _too_large(value, "")
        raise DocumentError(f"{source}: {place}: must be at most {LARGEST_NUMBER:g} in size")


def _shown(value: Any) -> str:
    """Show a value in an error message, without the content of lists: few lines of YAML can expand to gigabytes."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _holds_large_number(value: Any) -> bool:
    """Return whether `_too_large` would find a number; it need not keep the path to it."""
    match value:
        case str() | None:
            return False
        case int() | float():
            return abs(value) > LARGEST_NUMBER
        case dict():
            return any(map(_holds_large_number, value.values()))
        case tuple() | list():
            return any(map(_holds_large_number, value))
        case _ if is_dataclass(value):
            return any(_holds_large_number(getattr(value, field.name)) for field in fields(value))
        case _:
            return False


def _too_large(value: Any, where: str) -> str | None:
    """Return the path of the first number beyond LARGEST_NUMBER, or None."""
    members: list[tuple[str, Any]] = []
    if isinstance(value, int | float):
        return where if abs(value) > LARGEST_NUMBER else None
    if is_dataclass(value):
        members = list(field_values(value).items())
    elif isinstance(value, dict):
        members = [(_plain(str(name)), member) for name, member in value.items()]
    elif isinstance(value, tuple | list):
        members = [(str(number), member) for number, member in enumerate(value)]
    for name, member in members:
        large = _too_large(member, f"{where}.{name}" if where else name)
        if large is not None:
            return large
    return None


def loads(text: str | bytes, noun: Any, *, source: str = "document", absent: Mapping[str, Any] | None = None) -> Any:
    """Build the noun of a YAML or JSON text; `absent` as for `parse`. Raises DocumentError with one sentence."""
    return parse(loads_plain(text, source=source), noun, source=source, absent=absent)


def loads_plain(text: str | bytes, *, source: str = "document") -> Any:
    """Return the plain data of a YAML or JSON text. Raises DocumentError with one sentence."""
    try:
        return plain_data(text)
    except ValueError as error:
        raise DocumentError(f"{source}: {error}") from None


def loads_given(content: bytes, noun: Any, *, source: str = "document", absent: Mapping[str, Any] | None = None) -> Any:
    """Build the noun of a file that somebody gives, as `loads` does. Names in it are printed, so no control characters."""
    return parse(loads_plain_given(content, source=source), noun, source=source, absent=absent)


def loads_plain_given(content: bytes, *, source: str = "document") -> Any:
    """Return the plain data of a file that somebody gives. Raises DocumentError, also for control characters in texts."""
    data = loads_plain(content, source=source)
    try:
        control = find_control(data) if may_hold_controls(content) else None
    except RecursionError:
        return data  # refused as nested too deeply where it is parsed
    if control is not None:
        place, name = control
        where = f"{source}: {place}" if place else source
        raise DocumentError(f"{where}: holds the control or invisible character {name}; remove it")
    return data


def schema(noun: Any) -> dict[str, Any]:
    """Return the JSON schema of a noun's document, including `apiVersion` and `document`, which are optional."""
    json_schema = adapter(noun).json_schema()
    head = {"apiVersion": {"const": VERSION}, "document": {"const": kind_of(noun)}}
    return {**json_schema, "properties": {**head, **json_schema["properties"]}}
