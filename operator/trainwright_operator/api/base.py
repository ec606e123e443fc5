"""Base of all API models: camelCase fields, docstrings as descriptions, timestamps in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, NamedTuple

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
)
from pydantic.alias_generators import to_camel

from trainwright.outside.plain_text import plain_line

VALIDATIONS: Final = "x-kubernetes-validations"
"""Keyword of a schema's CEL rules."""


class ApiModel(BaseModel):
    """A part of the spec. Unknown fields are refused: a knob that is not known here must not look as if it worked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class StatusModel(ApiModel):
    """A part of the status. Unknown fields are kept as they are: a newer version of the operator may have written them."""

    model_config = ConfigDict(extra="allow")

    @field_validator("*", mode="before")
    @classmethod
    def _on_one_line(cls, value: Any) -> Any:
        """Return texts on one line and without control characters: columns and terminals show them."""
        return plain_line(value) if isinstance(value, str) and not value.isprintable() else value

    def dump(self) -> dict[str, Any]:
        """Return the model as plain JSON data without None values."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def says_the_same(self, other: StatusModel) -> bool:
        """Return whether both are stored as the same data; equal values are, which is sooner known."""
        return self == other or self.dump() == other.dump()


class Rule(NamedTuple):
    """CEL rule of a schema with its message to the user."""

    cel: str
    message: str


def rules(*pairs: tuple[str, str], field_path: str | None = None) -> dict[str, Any]:
    """Return the schema's CEL rules, each with its message to the user.

    `field_path`: the offending field relative to the rules, for example `.heads`.
    """
    blamed = {} if field_path is None else {"fieldPath": field_path}
    return {VALIDATIONS: [{"rule": rule, "message": message, **blamed} for rule, message in pairs]}


_INVISIBLE: Final = "holds a control or invisible character, which can hide or falsify what the text says; remove it"
PLAIN_LINE: Final = rules((r"!self.matches(r'[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]')", _INVISIBLE))
"""Rule of a text on one line. Its characters are those of `trainwright.outside.plain_text`."""
PLAIN_LINES: Final = rules((r"!self.matches(r'[^\P{Cc}\t\n\r]|[\p{Cf}\p{Zl}\p{Zp}]')", _INVISIBLE))
"""Rule of a text that may have tabs and line ends."""


def immutable(field: str) -> dict[str, Any]:
    """Return the rule of an immutable field."""
    return rules(("self == oldSelf", f"{field} is immutable; create another TrainingPlan"))


def opaque(**schema: Any) -> dict[str, Any]:
    """Return the schema of an object with unlisted fields."""
    return {"x-kubernetes-preserve-unknown-fields": True, **schema}


def without_default(schema: dict[str, Any]) -> None:
    """Remove the default from a field's schema; the model still has it.

    A default of the definition counts in `managedFields` as set by whoever created the plan, so that after a rollback all
    plans would seem to use a field that only the newer version knows.
    """
    schema.pop("default", None)


def _five_digits(value: float) -> float:
    return float(f"{value:.5g}")


Figure = Annotated[float, AfterValidator(_five_digits)]
"""A measured or predicted figure: five digits are more than a measurement holds, and columns stay readable.
The whole numbers stand in the ConfigMaps."""

Seconds = Annotated[int, Field(ge=1, le=604_800)]
"""A deadline: at least one second, at most a week."""


def cut_to(length: int) -> BeforeValidator:
    """Return a validator that cuts texts: messages quote what came from outside, which may be of any length."""
    return BeforeValidator(
        lambda text: f"{text[: length - 1]}…" if isinstance(text, str) and len(text) > length else text
    )


Text = Annotated[str, cut_to(1024), Field(max_length=1024)]
Name = Annotated[str, Field(max_length=253)]
"""The name of a Kubernetes object."""

Bytes = Annotated[int, Field(ge=0)]


def _whole_seconds(time: datetime) -> datetime:
    return time.astimezone(UTC).replace(microsecond=0)


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[
    AwareDatetime,
    AfterValidator(_whole_seconds),
    PlainSerializer(_text, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
