"""Layer profiles in the formats of other tools: one module per format, with one signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from trainwright.model import Model
from trainwright.profile_imports.amp_tables import import_amp
from trainwright.profile_imports.metis_tables import import_metis
from trainwright.profile_imports.reading import ImportOptions
from trainwright.profile_imports.sailor_tables import import_sailor
from trainwright.profiles import Profiles


class Importer(Protocol):
    """Importer of one accelerator's tables as profiles of a model; several paths are several tables or degrees.

    Raises ValueError with one sentence that names the file, the place in it and what to change.
    """

    def __call__(
        self, paths: Sequence[Path], *, model: Model, accelerator: str, options: ImportOptions | None = None
    ) -> Profiles: ...


FORMATS: Mapping[str, Importer] = MappingProxyType({"sailor": import_sailor, "metis": import_metis, "amp": import_amp})
"""Importers by their name in `trainwright profiles import --format`."""

__all__ = ["FORMATS", "ImportOptions", "Importer"]
