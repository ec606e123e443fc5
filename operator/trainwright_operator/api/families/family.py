"""What the families have in common: each is one of the planner's, its fields in camel case."""

from __future__ import annotations

import re
from typing import Any, ClassVar, cast

from pydantic.alias_generators import to_camel

from trainwright import families
from trainwright_operator.api.base import ApiModel


class FamilySpec(ApiModel):
    """A family of models: the planner's fields (dropout, which trials do without, left out), and the same defaults."""

    noun: ClassVar[Any]
    """The planner's family."""

    def family(self) -> families.Family:
        """The same model as the planner's noun. Raises ValueError, in the resource's words, where sizes do not fit."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        try:
            return cast("families.Family", self.noun(**fields))
        except ValueError as error:
            raise ValueError(in_camel_case(str(error))) from None


def in_camel_case(sentence: str) -> str:
    """A sentence of the planner's, with fields named as in the resource."""
    return re.sub(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", lambda found: to_camel(found[0]), sentence)
