"""What the papers print, as data: the files in `published`, and their nouns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from trainwright.documents import adapter

AmpSetting = Literal["homogeneous", "mixed_cluster", "mixed_model"]

OUT_OF_MEMORY = "OOM"
_CELL = re.compile(r"(?P<rate>[\d.]+) \((?P<batch>\d+)\)")


@dataclass(frozen=True, slots=True)
class SearchSeconds:
    """AMP, table 2: how long its search took."""

    nodes: int
    devices_per_node: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Tried:
    """AMP, tables 3–5: the plans of one method, measured: the best, their mean, and what stands behind ±."""

    least: float
    mean: float
    spread: float


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """AMP, tables 6–11: one plan and its measured seconds for an iteration.

    Attributes:
        rows: of one replica at a time (mbs).
        cuts: indices into AMP's list of entries between which a stage's entries lie.
        pipeline: as printed; where it is not the number of stages, the cuts are taken to be right.
    """

    table: str
    setting: AmpSetting
    method: str
    rows: int
    cuts: tuple[int, ...]
    tensor: int
    pipeline: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AmpFigures:
    """The file `amp.yaml`."""

    search_seconds: tuple[SearchSeconds, ...]
    methods: dict[AmpSetting, dict[str, Tried]]
    trials: tuple[MeasuredPlan, ...]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Galvatron-BMW, table I; megabytes (10⁶ bytes) that training keeps of a sample's forward."""

    parameters: float
    activation_megabytes: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples a second and the global batch size that reached it; None and 0 where it ran out of memory."""

    samples_per_second: float | None
    batch: int

    @classmethod
    def of(cls, cell: str) -> Throughput:
        """A cell as printed: `16.16 (24)` or `OOM`."""
        if cell == OUT_OF_MEMORY:
            return cls(None, 0)
        found = _CELL.fullmatch(cell)
        if found is None:
            raise ValueError(f"{cell!r} is no cell of a throughput table; write it like `16.16 (24)` or OOM")
        return cls(float(found["rate"]), int(found["batch"]))


@dataclass(frozen=True, slots=True)
class ThroughputFigures:
    """Galvatron-BMW, tables II, III and V: by budget (gigabytes of each device) and strategy a cell for each model."""

    table: str
    models: tuple[str, ...]
    budgets: dict[int, dict[str, tuple[str | None, ...]]]

    def cell(self, budget: int, strategy: str, model: str) -> Throughput | None:
        """None where the paper cannot be read."""
        text = self.budgets[budget][strategy][self.models.index(model)]
        return None if text is None else Throughput.of(text)


@dataclass(frozen=True, slots=True)
class BalancedFigures:
    """Galvatron-BMW, table IV: a cell, and how many layers each stage has."""

    cell: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GalvatronFigures:
    """The file `galvatron.yaml`; `balance` by budget, model and strategy."""

    models: dict[str, ModelFigures]
    eight_titan: ThroughputFigures
    sixteen_titan: ThroughputFigures
    sixteen_a100: ThroughputFigures
    sixty_four_a100: ThroughputFigures
    balance: dict[int, dict[str, dict[str, BalancedFigures]]]


@cache
def amp_figures() -> AmpFigures:
    """Tables 2–11 of AMP."""
    found: AmpFigures = _read("amp.yaml", AmpFigures)
    return found


@cache
def galvatron_figures() -> GalvatronFigures:
    """Tables I–V of Galvatron-BMW."""
    found: GalvatronFigures = _read("galvatron.yaml", GalvatronFigures)
    return found


def _read(name: str, noun: type) -> Any:
    text = files("trainwright.bench").joinpath("published").joinpath(name).read_text(encoding="utf-8")
    return adapter(noun).validate_python(yaml.safe_load(text))
