"""Models that tables of throughput name, read from `published/models.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from trainwright.accelerators.data_sheets import Source
from trainwright.documents import adapter
from trainwright.families import Bert, Family, Gpt, Llama, Moe

Sizes = dict[str, Any]
"""Fields of a family besides the sequence."""

_FAMILIES: dict[str, type[Gpt | Llama | Bert | Moe]] = {"gpt": Gpt, "llama": Llama, "bert": Bert, "moe": Moe}


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Sizes of one model, in exactly one family."""

    name: str
    family: str
    sizes: Sizes

    def __str__(self) -> str:
        return self.name

    def of_tokens(self, tokens: int, *, drops: bool) -> Family:
        """Return the model with sequences of `tokens`, and with dropout if its family has any and `drops`."""
        found = _FAMILIES[self.family](sequence_length=tokens, **self.sizes)
        return replace(found, dropout=drops) if isinstance(found, Gpt | Bert) else found


@dataclass(frozen=True, slots=True)
class _Entry:
    source: str
    aliases: tuple[str, ...] = ()
    gpt: Sizes | None = None
    llama: Sizes | None = None
    bert: Sizes | None = None
    moe: Sizes | None = None


@dataclass(frozen=True, slots=True)
class _ModelFile:
    sources: dict[str, Source]
    models: dict[str, _Entry]


def _plain(name: str) -> str:
    """Drop case and separators of a name but not its points: 1.3B and 13B differ."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")


@cache
def _by_name() -> dict[str, NamedModel]:
    text = files(__package__).joinpath("published", "models.yaml").read_text(encoding="utf-8")
    content: _ModelFile = adapter(_ModelFile).validate_python(yaml.safe_load(text))
    found: dict[str, NamedModel] = {}
    for name, entry in content.models.items():
        family = next(key for key in _FAMILIES if getattr(entry, key) is not None)
        model = NamedModel(name, family, getattr(entry, family))
        found |= {_plain(alias): model for alias in (name, *entry.aliases)}
    return found


def named_model(name: str) -> NamedModel:
    """Return a model by name, regardless of case and separators. Raises ValueError for an unknown one."""
    known = _by_name()
    found = known.get(_plain(name))
    if found is None:
        near = get_close_matches(_plain(name), known, n=3, cutoff=0.4)
        raise ValueError(
            f"model: the sizes of {name!r} are not known; the nearest are {', '.join(str(known[key]) for key in near)}"
        )
    return found
