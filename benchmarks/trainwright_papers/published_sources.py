"""Facts of the sources of published throughputs, read from `published/sources.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import yaml

from trainwright.documents import adapter

Value = bool | int | float | str | None
"""Value of a column; None where a field of Runtime is None."""

ASSUMED = "assumed"
"""Page of a fact that no page states."""


@dataclass(frozen=True, slots=True)
class SourceFact:
    """Value of a column for the rows of a source.

    Attributes:
        page: where the fact stands, by default the source's page; `assumed` if nowhere.
        note: the fact in the words of the page.
    """

    value: Value
    page: str | None = None
    note: str | None = None


Facts = dict[str, SourceFact]
"""Facts by the name of their column."""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Facts of those of a source's rows whose columns have one of the values of `when`."""

    when: dict[str, tuple[Value, ...]]
    facts: Facts

    def holds_for(self, cells: Mapping[str, str]) -> bool:
        return all(cells.get(column) in {str(value) for value in values} for column, values in self.when.items())


@dataclass(frozen=True, slots=True)
class RowSource:
    """Source of published rows.

    Attributes:
        models: names of `models.yaml` for names that the source uses in its own sense.
    """

    page: str
    facts: Facts
    parts: tuple[SourcePart, ...] = ()
    models: dict[str, str] = field(default_factory=dict)

    def values(self, cells: Mapping[str, str]) -> dict[str, Value]:
        """Return the values of columns for a row, of which `cells` are the columns that it fills."""
        facts = dict(self.facts)
        for part in self.parts:
            if part.holds_for(cells):
                facts |= part.facts
        return {column: fact.value for column, fact in facts.items()}


@dataclass(frozen=True, slots=True)
class _SourceFile:
    sources: dict[str, RowSource]


@cache
def row_sources() -> Mapping[str, RowSource]:
    """Load all sources, by their exact names."""
    text = files(__package__).joinpath("published", "sources.yaml").read_text(encoding="utf-8")
    content: _SourceFile = adapter(_SourceFile).validate_python(yaml.safe_load(text))
    return content.sources
