"""Registry of searches by name, each loaded on first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from trainwright.search.problem import Candidate, Problem, Search, SearchControl

SEARCH_MODULES: Mapping[str, str] = {
    "amp": "trainwright.search.amp:amp",
    "amp-annealing": "trainwright.search.annealing:amp_annealing",
    "alpa": "trainwright.search.alpa.search:alpa",
    "auto": "trainwright.search.auto.search:auto",
    "galvatron-base": "trainwright.search.galvatron.search:galvatron_base",
    "galvatron-bmw": "trainwright.search.galvatron.search:galvatron_bmw",
    "megatron": "trainwright.search.megatron:megatron",
    "random": "trainwright.search.random_search:random_search",
}
"""`module:function` of every search, by its public name."""


def load_search(target: str) -> Search:
    """Return the search at `module:function`."""
    module, _, function = target.partition(":")
    search: Search = getattr(import_module(module), function)
    return search


@dataclass(frozen=True, slots=True)
class LazySearch:
    """Search that is imported on its first call."""

    target: str

    def __call__(self, problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        return load_search(self.target)(problem, control, top)
