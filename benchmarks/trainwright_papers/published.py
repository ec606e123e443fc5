"""Figures that the papers print, read from the files in `published`."""

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
    """Duration of AMP's search (AMP, table 2)."""

    nodes: int
    devices_per_node: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MethodSeconds:
    """Measured seconds over the plans of one method (AMP, tables 3–5); `spread` is the number after ±."""

    least: float
    mean: float
    spread: float


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """One plan and its measured seconds per iteration (AMP, tables 6–11).

    Attributes:
        rows: rows per replica and micro-batch (mbs).
        cuts: boundaries of the stages, as indices into AMP's list of entries.
        pipeline: as printed; where it differs from the number of stages, the cuts are taken to be right.
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
    """Content of `amp.yaml`."""

    search_seconds: tuple[SearchSeconds, ...]
    methods: dict[AmpSetting, dict[str, MethodSeconds]]
    trials: tuple[MeasuredPlan, ...]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Parameters and stored activations of a model (Galvatron-BMW, table I); megabytes of 10⁶ bytes per sample."""

    parameters: float
    activation_megabytes: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples per second and the global batch size that reached them; None and 0 for out of memory."""

    samples_per_second: float | None
    batch: int

    @classmethod
    def of(cls, cell: str) -> Throughput:
        """Parse a cell as printed: `16.16 (24)` or `OOM`."""
        if cell == OUT_OF_MEMORY:
            return cls(None, 0)
        match = _CELL.fullmatch(cell)
        if match is None:
            raise ValueError(f"{cell!r} is no cell of a throughput table; write it like `16.16 (24)` or OOM")
        return cls(float(match["rate"]), int(match["batch"]))


@dataclass(frozen=True, slots=True)
class ThroughputFigures:
    """Printed throughput table (Galvatron-BMW, tables II, III and V).

    Attributes:
        budgets: cells in the order of `models`, by gigabytes of each device and by strategy.
    """

    table: str
    models: tuple[str, ...]
    budgets: dict[int, dict[str, tuple[str | None, ...]]]

    def cell(self, budget: int, strategy: str, model: str) -> Throughput | None:
        """Return a cell, or None if the paper is illegible."""
        text = self.budgets[budget][strategy][self.models.index(model)]
        return None if text is None else Throughput.of(text)


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """Throughput cell and the layers of each stage (Galvatron-BMW, table IV)."""

    cell: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GalvatronFigures:
    """Content of `galvatron.yaml`; `balance` by budget, model and strategy."""

    models: dict[str, ModelFigures]
    eight_titan: ThroughputFigures
    sixteen_titan: ThroughputFigures
    sixteen_a100: ThroughputFigures
    sixty_four_a100: ThroughputFigures
    balance: dict[int, dict[str, dict[str, PartitionFigures]]]


@dataclass(frozen=True, slots=True)
class GptSizes:
    """Model of Alpa, table 6, and the devices that it was trained on."""

    hidden_size: int
    layers: int
    heads: int
    devices: int


@dataclass(frozen=True, slots=True)
class MoeSizes:
    """Model of Alpa, table 7, and the devices that it was trained on."""

    hidden_size: int
    layers: int
    heads: int
    experts: int
    devices: int


@dataclass(frozen=True, slots=True)
class WideResnetSizes:
    """Model of Alpa, table 8, and the devices that it was trained on."""

    depth: Literal[50, 101, 152]
    base_channels: int
    width_factor: int
    devices: int


@dataclass(frozen=True, slots=True)
class AlpaFigures:
    """Content of `alpa.yaml`: models by their parameters."""

    gpt: dict[str, GptSizes]
    moe: dict[str, MoeSizes]
    wide_resnet: dict[str, WideResnetSizes]


@cache
def amp_figures() -> AmpFigures:
    """Read tables 2–11 of AMP."""
    figures: AmpFigures = _read("amp.yaml", AmpFigures)
    return figures


@cache
def galvatron_figures() -> GalvatronFigures:
    """Read tables I–V of Galvatron-BMW."""
    figures: GalvatronFigures = _read("galvatron.yaml", GalvatronFigures)
    return figures


@cache
def alpa_figures() -> AlpaFigures:
    """Read tables 6–8 of Alpa."""
    figures: AlpaFigures = _read("alpa.yaml", AlpaFigures)
    return figures


def _read(name: str, document_type: type) -> Any:
    text = files("trainwright_papers").joinpath("published").joinpath(name).read_text(encoding="utf-8")
    return adapter(document_type).validate_python(yaml.safe_load(text))
