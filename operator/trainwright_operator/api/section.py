"""What every part of the resource has in common: camelCase outside, snake_case inside, a sentence for every field."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Section(BaseModel):
    """A part of the spec. Unknown fields are refused: a knob that is not known here must not look as if it worked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class StatusSection(Section):
    """A part of the status. Unknown fields are left out: another version of the operator may have written them."""

    model_config = ConfigDict(extra="ignore")

    def dump(self) -> dict[str, Any]:
        """Plain data as the API server keeps it; what is None is absent."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def rules(*pairs: tuple[str, str], field_path: str | None = None) -> dict[str, Any]:
    """The schema's CEL rules, each with the sentence that a person reads when it does not hold.

    `field_path` names the field that is to blame, relative to where the rules stand, for example `.heads`.
    """
    blamed = {} if field_path is None else {"fieldPath": field_path}
    return {"x-kubernetes-validations": [{"rule": rule, "message": message, **blamed} for rule, message in pairs]}


def immutable(field: str) -> dict[str, Any]:
    """The rule of a field that stays as it was created."""
    return rules(("self == oldSelf", f"{field} is immutable; create another TrainingPlan"))


def opaque(**schema: Any) -> dict[str, Any]:
    """The schema of an object whose fields are not listed here."""
    return {"x-kubernetes-preserve-unknown-fields": True, **schema}


def _five_digits(value: float) -> float:
    return float(f"{value:.5g}")


Figure = Annotated[float, AfterValidator(_five_digits)]
"""A measured or predicted figure: five digits are more than a measurement holds, and columns stay readable.
The whole numbers stand in the ConfigMaps."""

Seconds = Annotated[int, Field(ge=1, le=604_800)]
"""A deadline: at least one second, at most a week."""

Text = Annotated[str, Field(max_length=1024)]
Name = Annotated[str, Field(max_length=253)]
"""The name of a Kubernetes object."""

Bytes = Annotated[int, Field(ge=0)]
