"""The part `spec.model`, derived from the planner's families: their fields, bounds, descriptions and rules."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Union, cast, get_args, get_origin

from pydantic import ConfigDict, Field, create_model
from pydantic.alias_generators import to_camel

from trainwright.bounds import OMITTED_DEFAULT, OMITTED_ONE
from trainwright.families import FAMILIES, CustomChecks, CustomKind, Family
from trainwright.families.fields import Bounds, Doc, Length, RotaryScaling, field_types
from trainwright.families.resource_names import resource_name, spec_field
from trainwright_operator.api.base import PLAIN_LINE, VALIDATIONS, ApiModel, rules, without_default

_CAMEL_CASE: Final = {
    name: resource_name(name)
    for name in (
        *(name for noun in (*FAMILIES.values(), CustomKind, CustomChecks, RotaryScaling) for name in field_types(noun)),
        *FAMILIES,
    )
}
"""Names in the resource by the planner's."""

_NAMES: Final = tuple(_CAMEL_CASE[tag] for tag in FAMILIES)


def in_camel_case(sentence: str) -> str:
    """Return a sentence or a rule of the planner's with fields and families named as in the resource."""
    return re.sub(r"\b\w+\b", lambda word: _CAMEL_CASE.get(word[0], word[0]), sentence)


class DerivedModel(ApiModel):
    """A family of models or a part of one: the planner's fields (dropout, which trials do without, left out)."""

    noun: ClassVar[type[Any]]
    """The planner's class."""

    def to_noun(self) -> Any:
        """Return the planner's noun of the same values. Raise ValueError where sizes do not fit."""
        return self.noun(**{name: _to_noun(getattr(self, name)) for name in type(self).model_fields})


def _to_noun(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_to_noun(member) for member in value)
    return value.to_noun() if isinstance(value, DerivedModel) else value


_DERIVED: Final[dict[type[Any], type[DerivedModel]]] = {}


def _derived(noun: type[Any]) -> type[DerivedModel]:
    """Return the model of a family or of a part of one, the same for every family that has the part."""
    if noun in _DERIVED:
        return _DERIVED[noun]
    types = field_types(noun)
    definitions: dict[str, Any] = {}
    for field in fields(noun):
        doc = _doc(types[field.name])
        if field.name != "family" and doc.is_offered:
            default = ... if field.default is MISSING else field.default
            definitions[field.name] = (_constrained(types[field.name]), default)
    model: type[DerivedModel] = create_model(f"{noun.__name__}Spec", __base__=DerivedModel, **definitions)
    model.noun = noun
    _DERIVED[noun] = model
    globals()[model.__name__] = model  # pickle looks classes up by name
    return model


def _doc(hint: Any) -> Doc:
    """Return a field's description; of several the outermost."""
    return next(note for note in reversed(get_args(hint)) if isinstance(note, Doc))


def _constrained(hint: Any) -> Any:
    """Return a planner's type with its bounds and descriptions as pydantic reads them."""
    if is_dataclass(hint):
        return _derived(cast("type[Any]", hint))
    kind, members = get_origin(hint), get_args(hint)
    if kind is Annotated:
        plain = (Field(json_schema_extra=PLAIN_LINE),) if members[0] is str else ()
        is_unset = (
            OMITTED_DEFAULT in members
            or OMITTED_ONE in members
            or not all(note.stores_default for note in members if isinstance(note, Doc))
        )
        unset = (Field(json_schema_extra=without_default),) if is_unset else ()
        notes = (note for note in members[1:] if isinstance(note, Bounds | Doc))
        return Annotated[_constrained(members[0]), *map(_constraint, notes), *plain, *unset]
    if kind in (Union, UnionType):
        return _constrained(members[0]) | None
    return GenericAlias(tuple, (_constrained(members[0]), ...)) if kind is tuple else hint


def _constraint(note: Bounds | Doc) -> Any:
    if isinstance(note, Doc):
        return Field(description=in_camel_case(note.text))
    least, most = ("min_length", "max_length") if isinstance(note, Length) else ("ge", "le")
    limits: dict[str, Any] = {least: note.least, most: note.most}
    return Field(**limits)


def _rules(noun: type[Any]) -> dict[str, Any]:
    """Return the schema's CEL rules of a family."""
    own_rules = [
        rules(
            (in_camel_case(rule.cel), in_camel_case(rule.sentence)),
            field_path=f".{to_camel(rule.field)}" if rule.field else None,
        )
        for rule in noun.rules
    ]
    return {VALIDATIONS: [rule for stated in own_rules for rule in stated[VALIDATIONS]]}


class ModelChoice(ApiModel):
    """The model: exactly one family."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"[{', '.join(f'has(self.{name})' for name in _NAMES)}].filter(given, given).size() == 1",
                f"model needs exactly one family; set one of {', '.join(f'model.{name}' for name in _NAMES)}",
            )
        )
    )

    @cached_property
    def family(self) -> Family:
        """Return the one family. Raise ValueError, in the resource's words, if there is not one or sizes do not fit."""
        families = [value for name in type(self).model_fields if (value := getattr(self, name)) is not None]
        if len(families) != 1:
            raise ValueError(f"model needs exactly one family, got {len(families)}; set one of {', '.join(_NAMES)}")
        try:
            family: Family = families[0].to_noun()
        except ValueError as error:
            raise ValueError(in_camel_case(str(error))) from None
        return family


if TYPE_CHECKING:
    ModelSpec = ModelChoice  # a type checker does not see the derived fields
else:
    ModelSpec = create_model(
        "ModelSpec",
        __base__=ModelChoice,
        **{
            spec_field(tag): (
                _derived(noun) | None,
                Field(None, description=_doc(field_types(noun)["family"]).text, json_schema_extra=_rules(noun)),
            )
            for tag, noun in FAMILIES.items()
        },
    )
