"""What families bound alike: single fields, and how fields must fit each other."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field

from trainwright_operator.api.base import rules

Layers = Annotated[int, Field(ge=1, le=1024)]
Heads = Annotated[int, Field(ge=1, le=1024)]
Width = Annotated[int, Field(ge=1, le=1_048_576)]
Tokens = Annotated[int, Field(ge=1, le=1_048_576)]
Entries = Annotated[int, Field(ge=1, le=4_194_304)]
Pixels = Annotated[int, Field(ge=1, le=65_536)]

Rule = tuple[str, str]

HEADS_RULE: Final[Rule] = (
    "self.hiddenSize % self.heads == 0",
    "hiddenSize must be a multiple of heads, since every head takes an equal part; change one of the two",
)
KEY_VALUE_HEADS_RULE: Final[Rule] = (
    "!has(self.keyValueHeads) || self.heads % self.keyValueHeads == 0",
    "heads must be a multiple of keyValueHeads, since each of these serves equally many heads; change one of the two",
)
PATCHES_RULE: Final[Rule] = (
    "self.imageSize % self.patchSize == 0",
    "imageSize must be a multiple of patchSize, since patches tile the image; change one of the two",
)


def ruled(*pairs: Rule) -> ConfigDict:
    """The configuration of a part of the resource in which these rules hold."""
    return ConfigDict(json_schema_extra=rules(*pairs))
