"""DeviceClasses that let pods ask for published devices by the name of a resource, as for those of a device plugin.

Of the CEL of their selectors, equality of driver and attributes is known, joined by `&&`: the published drivers' own
classes need no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Value = str | bool | int
"""Value of a device's attribute."""

_STRING: Final = r"""(?:"[^"\\]*"|'[^'\\]*')"""
_ATTRIBUTE: Final = rf"device\.attributes\[\s*({_STRING})\s*\](?:\.(\w+)|\[\s*({_STRING})\s*\])"
_LITERAL: Final = rf"({_STRING}|true|false|-?\d+)"
_TERM: Final = re.compile(
    rf"(?P<driver>device\.driver\s*==\s*({_STRING}))"
    rf"|(?P<equal>{_ATTRIBUTE}\s*==\s*{_LITERAL})"
    rf"|(?P<has>has\(\s*{_ATTRIBUTE}\s*\))"
    rf"|(?P<inside>({_STRING})\s+in\s+device\.attributes\[\s*({_STRING})\s*\])"
)
_MAX_SHOWN: Final = 80


class SelectorNotUnderstood(ValueError):  # noqa: N818 - an answer in words
    """Part of an expression that is none of the known terms."""


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """Condition of a selector.

    Attributes:
        attribute: `domain/name`; empty for the driver.
        value: None if the attribute only has to be there.
    """

    attribute: str
    value: Value | None

    def holds(self, driver: str, attributes: Mapping[str, Value]) -> bool:
        """Return whether a device meets the condition; `attributes` by qualified name."""
        if not self.attribute:
            return self.value == driver
        value = attributes.get(self.attribute)
        if self.value is None:
            return value is not None
        return type(value) is type(self.value) and value == self.value


def parse_selector(expression: str) -> tuple[DeviceCondition, ...]:
    """Return the conditions of a CEL expression. Raise SelectorNotUnderstood with the first part that is not known.

    With `&&` as the only operator parentheses change nothing.
    """
    conditions, place, depth = [], 0, 0
    while True:
        depth, place = _skip(expression, place, "(", depth, 1)
        term = _TERM.match(expression, place)
        if term is None:
            raise SelectorNotUnderstood(_shown(expression[place:]))
        conditions.append(_condition(term))
        depth, place = _skip(expression, term.end(), ")", depth, -1)
        if place == len(expression) and depth == 0:
            return tuple(conditions)
        if depth < 0 or not expression.startswith("&&", place):
            raise SelectorNotUnderstood(_shown(expression[place:] or expression))
        place += 2


def _skip(text: str, place: int, bracket: str, depth: int, step: int) -> tuple[int, int]:
    while place < len(text) and (text[place].isspace() or text[place] == bracket):
        depth += step if text[place] == bracket else 0
        place += 1
    return depth, place


def _condition(term: re.Match[str]) -> DeviceCondition:
    first, *others = (_literal(part) for part in [part for part in term.groups() if part is not None][1:])
    if term["driver"]:
        return DeviceCondition("", first)
    if term["inside"]:
        return DeviceCondition(f"{others[0]}/{first}", None)
    return DeviceCondition(f"{first}/{others[0]}", others[1] if term["equal"] else None)


def _literal(text: str) -> Value:
    if text[0] in "\"'":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdecimal() else text


def _shown(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_SHOWN else f"{flat[: _MAX_SHOWN - 1]}…"


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """DeviceClass with an extended resource.

    Attributes:
        created_at: as the API server writes it.
        problem: what of its selectors is not understood, so that nobody knows which devices it selects; else empty.
    """

    name: str
    resource_name: str
    created_at: str = ""
    conditions: tuple[DeviceCondition, ...] = ()
    problem: str = ""

    @classmethod
    def of(cls, name: str, resource_name: str, created_at: str, expressions: Sequence[str]) -> DeviceClass:
        """Parse the selectors, all of which a device has to meet."""
        conditions: list[DeviceCondition] = []
        for expression in expressions:
            try:
                conditions += parse_selector(expression)
            except SelectorNotUnderstood as error:
                problem = (
                    f"its devices are those of DeviceClass {name}, whose selector is not understood at `{error}`; use "
                    "conditions like device.driver == '…' and device.attributes['…'].type == '…', joined by &&"
                )
                return cls(name, resource_name, created_at, problem=problem)
        return cls(name, resource_name, created_at, tuple(conditions))

    def selects(self, driver: str, attributes: Mapping[str, Value]) -> bool:
        return not self.problem and all(condition.holds(driver, attributes) for condition in self.conditions)


def classes_by_resource(classes: Iterable[DeviceClass]) -> dict[str, DeviceClass]:
    """Return the class that the scheduler takes for each resource: the newest, and of these the first by name."""
    by_age = sorted(
        sorted(classes, key=lambda device_class: device_class.name, reverse=True),
        key=lambda device_class: device_class.created_at,
    )
    return {device_class.resource_name: device_class for device_class in by_age}
