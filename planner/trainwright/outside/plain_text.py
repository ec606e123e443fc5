"""Text without control characters: what came from outside cannot steer a terminal, reverse a line or hide in one.

Letters, signs and emoji of every script stay. Joined emoji fall apart into their parts, since the joiner is invisible.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Final, TypeVar

T = TypeVar("T")

_INVISIBLE: Final = (
    "\x7f-\x84\x86-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f\ud800-\udfff"
)
"""Control and format characters and lone surrogates (Unicode's Cc, Cf, Cs), those below U+0020 apart."""
_SPACING: Final = "\x0b\x0c\x1c-\x1e\x85\u2028\u2029"
"""Characters that some readers take for the end of a line."""
_CONTROL: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x85{_INVISIBLE}\u2028\u2029]")
_SEQUENCE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours and movements of the cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # titles, links, and their like
    r"|\x1b[ -/]*[0-~]"
)
"""Escape sequences of terminals, of which nothing is to be read."""
_LINE_END: Final = re.compile(r"\r\n?")
_SPACE: Final = re.compile(f"[{_SPACING}]")
_ESCAPED: Final = re.compile(r"\\[^nt\\\"/]")
"""Escapes of JSON and YAML for characters that may be controls."""
_TEXTLESS: Final = frozenset({int, float, bool, type(None)})


def plain_text(text: str) -> str:
    """Return the text without escape sequences and control characters, except for tabs and line ends."""
    if _is_plain_text(text):
        return text
    ended = _SPACE.sub(" ", _LINE_END.sub("\n", _SEQUENCE.sub("", text)))
    return _CONTROL.sub("", ended)


def plain_line(text: str) -> str:
    """Return the text as `plain_text` does, on one line with single spaces."""
    return " ".join(plain_text(text).split())


def without_controls(value: T, *, except_under: Collection[str] = ()) -> T:
    """Return the value with `plain_text` of every text in it: in dataclasses, mappings with their keys, lists and tuples.

    `except_under`: keys of mappings whose values stay as they are.
    """
    kept = frozenset(except_under)
    if _is_plain(value, kept):  # nearly always, and several times as fast as making the value anew
        return value
    plain: Any = _plain(value, kept)
    return plain  # type: ignore[no-any-return]


def _is_plain(value: Any, kept: frozenset[str]) -> bool:  # noqa: PLR0911 - a kind of value each
    kind: Any = type(value)
    if kind is str:
        return _is_plain_text(value)
    if kind in _TEXTLESS:
        return True
    if kind is dict:
        members = (
            value.values() if kept.isdisjoint(value) else [member for key, member in value.items() if key not in kept]
        )
        return _are_plain(value, kept) and _are_plain(members, kept)
    if kind is list or kind is tuple:
        return _are_plain(value, kept)
    if isinstance(value, str):
        return _is_plain_text(value)
    if names := _field_names(kind):
        return _are_plain([getattr(value, name) for name in names], kept)
    return _is_plain(dict(value), kept) if isinstance(value, Mapping) else True


def _are_plain(values: Collection[Any], kept: frozenset[str]) -> bool:
    try:
        text = "".join(values)  # such as labels, all at once
    except TypeError:
        return all(_is_plain(value, kept) for value in values)
    return _is_plain_text(text)


def _is_plain_text(text: str) -> bool:
    return text.isprintable() or _CONTROL.search(text) is None


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass' fields or of a named tuple's members, or none."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return tuple(getattr(kind, "_fields", ()))


def _plain(value: Any, kept: frozenset[str]) -> Any:  # noqa: PLR0911 - a kind of value each
    """Return the value itself where it needs no change."""
    if isinstance(value, str):
        plain = plain_text(value)
        return value if plain is value else type(value)(plain)
    if isinstance(value, Mapping):
        members = {_plain(key, kept): member if key in kept else _plain(member, kept) for key, member in value.items()}
        is_same = all(members.get(key, members) is member for key, member in value.items())
        return value if is_same else members
    if isinstance(value, list | tuple):
        plain_members = [_plain(member, kept) for member in value]
        if all(new is old for new, old in zip(plain_members, value, strict=True)):
            return value
        if hasattr(value, "_make"):
            return value._make(plain_members)
        return plain_members if isinstance(value, list) else tuple(plain_members)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: _plain(old, kept) for field in fields(value) if (old := getattr(value, field.name)) is not None
        }
        changes = {name: new for name, new in changes.items() if new is not getattr(value, name)}
        return replace(value, **changes) if changes else value
    return value


def may_hold_controls(json_text: str | bytes) -> bool:
    """Return whether a text of JSON or YAML may hold control characters, as they are or escaped."""
    if isinstance(json_text, bytes):
        try:
            json_text = json_text.decode()
        except UnicodeDecodeError:
            return True
    return _ESCAPED.search(json_text) is not None or _CONTROL.search(json_text) is not None


def find_control(value: Any, place: str = "") -> tuple[str, str] | None:
    """Return the place and the name (such as U+001B) of the first control character in plain data, or None.

    Tabs and line ends are none.
    """
    if isinstance(value, str):
        control = _CONTROL.search(_LINE_END.sub("\n", value))
        return (place, f"U+{ord(control[0]):04X}") if control is not None else None
    members: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str) and (of_key := find_control(key)) is not None:
                return f"{place}: the name {plain_line(key)!r}".removeprefix(": "), of_key[1]
        members = [(f"{place}.{key}".removeprefix("."), member) for key, member in value.items()]
    elif isinstance(value, list | tuple):
        members = [(f"{place}[{_label(member, number)}]", member) for number, member in enumerate(value)]
    return next((inside for name, member in members if (inside := find_control(member, name)) is not None), None)


def _label(member: Any, number: int) -> str:
    name = member.get("name") if isinstance(member, Mapping) else None
    return name if isinstance(name, str) and name and find_control(name) is None else str(number)
