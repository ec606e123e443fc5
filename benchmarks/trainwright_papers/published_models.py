"""Models that tables of throughput name, read from `published/models.yaml` and from a user's file of the same form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from trainwright.accelerators.data_sheets import Source
from trainwright.documents import adapter
from trainwright.families import FAMILIES, T5, Bert, Family, Gpt
from trainwright_papers.published_sources import RowSource, row_sources

Sizes = dict[str, Any]
"""Fields of a family besides the sequence."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Sizes of one model, in exactly one family."""

    name: str
    family: str
    sizes: Sizes

    def __str__(self) -> str:
        return self.name

    def of_tokens(self, tokens: int, *, drops: bool) -> Family:
        """Return the model with sequences of `tokens`, unless it reads images, and with dropout if its family has any and `drops`."""
        noun = FAMILIES[self.family]
        sequence = {"sequence_length": tokens} if "sequence_length" in noun.__dataclass_fields__ else {}
        family: Family = adapter(noun).validate_python({**sequence, **self.sizes})
        return replace(family, dropout=drops) if isinstance(family, Gpt | Bert | T5) else family


@dataclass(frozen=True, slots=True)
class _Entry:
    """Sizes of a model in one family.

    Attributes:
        rows_of: names of the only sources whose rows mean this model by the name and the aliases; empty: any source's.
    """

    source: str
    aliases: tuple[str, ...] = ()
    rows_of: tuple[str, ...] = ()
    gpt: Sizes | None = None
    llama: Sizes | None = None
    bert: Sizes | None = None
    moe: Sizes | None = None
    t5: Sizes | None = None
    vit: Sizes | None = None
    swin: Sizes | None = None
    wide_resnet: Sizes | None = None
    trans_gan: Sizes | None = None

    @property
    def families(self) -> dict[str, Sizes]:
        """Sizes by family, of which there should be one."""
        return {name: getattr(self, name) for name in FAMILIES if getattr(self, name, None) is not None}


@dataclass(frozen=True, slots=True)
class _ModelFile:
    sources: dict[str, Source]
    models: dict[str, _Entry]

    def keys(self) -> Iterator[tuple[tuple[str | None, str], NamedModel]]:
        """Yield the models by the source of rows, None for any, and the plain name."""
        for name, entry in self.models.items():
            if len(entry.families) != 1:
                raise ValueError(f"models.{name}: give the sizes in exactly one family, such as gpt or llama")
            model = NamedModel(name, *next(iter(entry.families.items())))
            try:
                model.of_tokens(1, drops=False)
            except ValidationError as error:
                raise ValueError(f"models.{name}: {first_refusal(error)}") from None
            for alias in (name, *entry.aliases):
                yield from (((source, _plain(alias)), model) for source in entry.rows_of or (None,))


def first_refusal(error: ValidationError) -> str:
    """Return in one sentence what is wrong first, and where."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where + ': ' if where else ''}{first['msg']}, got {first['input']!r}"


def _plain(name: str) -> str:
    """Drop case and separators of a name but not its points: 1.3B and 13B differ."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")


@dataclass(frozen=True)
class ModelNames:
    """Models by the source of the rows that name them, None for any, and by plain name; a user's before the project's."""

    of_user: dict[tuple[str | None, str], NamedModel] = field(default_factory=dict)

    def model(self, name: str, source: str) -> NamedModel:
        """Return the model that rows of a source name, regardless of case and separators. Raises ValueError for an unknown one."""
        row_source = row_sources().get(source)
        meant = row_source.models.get(name, name) if isinstance(row_source, RowSource) else name
        for models, words in ((self.of_user, name), (_known_models(), meant)):
            for key in ((source, _plain(words)), (None, _plain(words))):
                if key in models:
                    return models[key]
        others = sorted({of for of, plain in _known_models() if of is not None and plain == _plain(name)})
        if others:
            raise ValueError(
                f"model: by {name!r} rows of {', '.join(others)} mean sizes of their own, which need not be those of {source}; "
                "state its sizes with --models"
            )
        near = get_close_matches(_plain(name), [plain for of, plain in _known_models() if of is None], n=3, cutoff=0.4)
        nearest = ", ".join(str(_known_models()[None, plain]) for plain in near)
        raise ValueError(
            f"model: the sizes of {name!r} are not known; state them with --models{f', the nearest are {nearest}' if nearest else ''}"
        )


PROJECT_NAMES: Final = ModelNames()
"""The project's models alone."""


@cache
def _known_models() -> dict[tuple[str | None, str], NamedModel]:
    text = files(__package__).joinpath("published", "models.yaml").read_text(encoding="utf-8")
    content: _ModelFile = adapter(_ModelFile).validate_python(yaml.safe_load(text))
    return dict(content.keys())


def read_models(path: Path | None) -> ModelNames:
    """Return the project's models, and before them those of a file. Raises ValueError with one sentence on what is wrong with it."""
    if path is None:
        return PROJECT_NAMES
    try:
        content = adapter(_ModelFile).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
        return ModelNames(dict(content.keys()))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {first_refusal(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
