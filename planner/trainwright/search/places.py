"""Where the searches live: each is loaded when it is first asked for, since some take long to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from trainwright.search.protocol import Candidate, Control, Problem, Search

PLACES: Mapping[str, str] = {
    "amp": "trainwright.search.amp:amp",
    "amp-annealing": "trainwright.search.annealing:amp_annealing",
    "alpa": "trainwright.search.alpa.search:alpa",
    "auto": "trainwright.search.auto.auto:auto",
    "galvatron-base": "trainwright.search.galvatron.base:galvatron_base",
    "galvatron-bmw": "trainwright.search.galvatron.bmw:galvatron_bmw",
    "megatron": "trainwright.search.megatron:megatron",
    "random": "trainwright.search.random_search:random_search",
}
"""Module and function of every search, by the name that people know it under."""


def loaded(place: str) -> Search:
    """The search at `module:function`."""
    module, _, function = place.partition(":")
    search: Search = getattr(import_module(module), function)
    return search


@dataclass(frozen=True, slots=True)
class Named:
    """A search by its place."""

    place: str

    def __call__(self, problem: Problem, control: Control, top: int | None) -> list[Candidate]:
        return loaded(self.place)(problem, control, top)
