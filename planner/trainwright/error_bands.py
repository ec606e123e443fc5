"""Error bands of estimates from data sheets: how far published runs lay from their estimates, by framework and generation.

`trainwright bench published --write-bands FILE` makes `error_bands.json` from tables of published throughputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Final

from trainwright.accelerators.data_sheets import data_sheet, has_data_sheet
from trainwright.documents import adapter
from trainwright.plan import Plan
from trainwright.runtime import OwnTrials
from trainwright.strategy import Sharding

MEAN_MEASURED_ERROR: Final = 0.015
"""Mean error of predictions with measured profiles, on emulated devices (docs/accuracy.md)."""
MIN_SOURCES: Final = 3
"""Sources below which a band of a framework or a generation says too little: the errors of one source are alike."""
BAND_DEVIATIONS: Final = 1.42
"""Half of a band's width in standard deviations: mean of the normal quantiles above 10 % and below 6 %, which lie outside."""
EIGHT_OF_TEN_DEVIATIONS: Final = 1.28
"""Standard deviations within which 8 of 10 of a normal distribution lie."""


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """Measured over estimated seconds, between which 8 of 10 runs of a source that did not make the band lie.

    Each source that made it weighs the same.

    Attributes:
        framework: trainer of the runtime, or another framework; None: all.
        generation: of accelerators; None: all.
        within_ratio: deviation of runs of one source over that of all runs, in logarithms: what remains of the band
            once trials have shown how far the runs of one user are off together.
    """

    framework: str | None
    generation: str | None
    sources: int
    runs: int
    least_ratio: float
    greatest_ratio: float
    within_ratio: float

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Return the seconds between which a measurement is expected; the estimate itself is among them."""
        return seconds * min(self.least_ratio, 1.0), seconds * max(self.greatest_ratio, 1.0)

    @property
    def width(self) -> float:
        """Width as a logarithm."""
        return math.log(self.greatest_ratio / self.least_ratio)

    def narrowed(self, own: OwnTrials) -> ErrorBand:
        """Return the band after calibration to a user's own trials, in which 8 of 10 further runs of this user lie.

        A run's logarithmic error is that of its source plus its own, of variance w. The fit takes away the mean error of n
        trials, and with it all of the first and leaves w / n of its own mean.
        """
        published = (self.width / 2 / BAND_DEVIATIONS * self.within_ratio) ** 2
        half = EIGHT_OF_TEN_DEVIATIONS * math.sqrt(own.remaining_variance(published) * (1 + 1 / own.count))
        return replace(self, least_ratio=math.exp(-half), greatest_ratio=math.exp(half))


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


def generation_of(accelerator: str) -> str | None:
    """Return the generation of an accelerator; None without a data sheet."""
    return data_sheet(accelerator).generation if has_data_sheet(accelerator) else None


def error_band(
    framework: str | None, generations: Collection[str | None], bands: Sequence[ErrorBand] | None = None
) -> ErrorBand:
    """Return the band of a framework on accelerators of some generations, the widest one; without `bands` the committed ones.

    Where fewer than three sources make it, it is that of the generation, then of the framework, then of all runs.
    """
    by_key = {(band.framework, band.generation): band for band in (error_bands() if bands is None else bands)}

    def of(generation: str | None) -> ErrorBand:
        for key in ((framework, generation), (None, generation), (framework, None)):
            if key in by_key and by_key[key].sources >= MIN_SOURCES:
                return by_key[key]
        return by_key[None, None]

    return max(map(of, generations), key=lambda band: band.greatest_ratio / band.least_ratio)


def scarce_runs(accelerators: Collection[str]) -> dict[str, int]:
    """Return how many published runs used each of the accelerators whose generation fewer than three sources used.

    Accelerators without a data sheet have none.
    """
    by_generation = {
        band.generation or "": band for band in error_bands() if band.framework is None and band.generation
    }
    runs_by_name = {}
    for name in accelerators:
        band = by_generation.get(generation_of(name) or "")
        if band is None or band.sources < MIN_SOURCES:
            runs_by_name[name] = 0 if band is None else band.runs
    return runs_by_name
