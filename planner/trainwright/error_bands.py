"""Error bands of estimates from data sheets: how far published runs lay from their estimates, by generation and kind of plan.

`trainwright bench published --write-bands FILE` makes `error_bands.json` from a table of published throughputs.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from trainwright.accelerators.data_sheets import data_sheet, has_data_sheet
from trainwright.documents import adapter
from trainwright.plan import Plan
from trainwright.strategy import Sharding

MEAN_MEASURED_ERROR: Final = 0.015
"""Mean error of predictions with measured profiles, on emulated devices (docs/accuracy.md)."""
MIN_RUNS: Final = 10
"""Runs below which a band of a generation or a kind of plan says too little."""


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """Measured over estimated seconds: the quantiles of 10 and 90 % of published runs.

    Attributes:
        generation, plan: of accelerators and kind of plan; None: all.
    """

    generation: str | None
    plan: str | None
    runs: int
    least_ratio: float
    greatest_ratio: float

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Return the seconds between which a measurement is expected; the estimate itself is among them."""
        return seconds * min(self.least_ratio, 1.0), seconds * max(self.greatest_ratio, 1.0)


def plan_kind(plan: Plan) -> str:
    """Return how a plan divides the model: any of tp, pp and fsdp or dp, or `one GPU`."""
    runs = [run for stage in plan.stages for run in stage.layers]
    shards = any(run.strategy.sharding in {Sharding.ZERO2, Sharding.ZERO3} and run.strategy.data > 1 for run in runs)
    replicas = len(plan.pipelines) > 1 or any(run.strategy.data > 1 for run in runs)
    parts = [
        *(["tp"] if any(run.strategy.tensor > 1 for run in runs) else []),
        *(["pp"] if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines) else []),
        *(["fsdp"] if shards else ["dp"] if replicas else []),
    ]
    return "+".join(parts) or "one GPU"


@cache
def error_bands() -> tuple[ErrorBand, ...]:
    """Load the committed bands."""
    text = files("trainwright").joinpath("error_bands.json").read_text(encoding="utf-8")
    bands: tuple[ErrorBand, ...] = adapter(tuple[ErrorBand, ...]).validate_python(json.loads(text))
    return bands


def error_band(plan: Plan, accelerators: Collection[str]) -> ErrorBand:
    """Return the band of a plan on accelerators: of the generation and kind of plan with the widest one.

    Where too few such runs were published, it is that of the kind of plan, then of the generation, then of all runs.
    """
    generations = {data_sheet(name).generation if has_data_sheet(name) else None for name in accelerators}
    kind = plan_kind(plan)
    return max((_band(generation, kind) for generation in generations), key=lambda band: band.greatest_ratio)


def overall_band() -> ErrorBand:
    """Return the band of all published runs."""
    return next(band for band in error_bands() if band.generation is None and band.plan is None)


def scarce_runs(band: ErrorBand, accelerators: Collection[str]) -> dict[str, int]:
    """Return how many runs like the band's ran on each of the accelerators whose generation has too few for its own band.

    Accelerators without a data sheet have none. Empty where the band is of the generation of all of them.
    """
    runs_of = {each.generation: each.runs for each in error_bands() if each.plan == band.plan and each.generation}
    runs_by_name = {}
    for name in accelerators:
        generation = data_sheet(name).generation if has_data_sheet(name) else None
        runs = runs_of.get(generation or "", 0)
        if runs < MIN_RUNS and generation != (band.generation or ""):
            runs_by_name[name] = runs
    return runs_by_name


def _band(generation: str | None, kind: str) -> ErrorBand:
    bands = {(band.generation, band.plan): band for band in error_bands() if band.runs >= MIN_RUNS}
    for key in ((generation, kind), (None, kind), (generation, None)):
        if key in bands and key != (None, None):
            return bands[key]
    return bands[None, None]
