"""Error bands that published runs make, and the test of the bands on each source by those of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import exp, log
from typing import Final

import numpy as np

from trainwright.error_bands import ErrorBand, error_band
from trainwright.runtime import OwnTrials
from trainwright_papers.published_scores import ScoredRow, groups, source_of

FASTER_RATIO: Final = 0.1
SLOWER_RATIO: Final = 0.06
"""Shares of the runs below a band and above it, each source weighing the same. They leave out less than a fifth, so that of
sources that did not make the band 8 of 10 runs lie inside, and of none of 20 runs fewer than 6 (docs/accuracy.md).
"""


OWN_TRIALS: Final = 5
DRAWS: Final = 24
"""Rows of a source that are its trials in the test of narrowed bands, and draws of them."""


def bands_of(scored: Sequence[ScoredRow]) -> list[ErrorBand]:
    """Return the error bands of all rows, by framework, by generation, and by both."""

    def keys(each: ScoredRow) -> Iterator[tuple[str | None, str | None]]:
        yield from set(product((None, each.framework), (None, each.generation)))

    members: dict[tuple[str | None, str | None], list[ScoredRow]] = {}
    for each in scored:
        for key in keys(each):
            members.setdefault(key, []).append(each)
    return [
        _band(framework, generation, some)
        for (framework, generation), some in sorted(members.items(), key=lambda item: [name or "" for name in item[0]])
    ]


def _band(framework: str | None, generation: str | None, scored: Sequence[ScoredRow]) -> ErrorBand:
    by_source = [np.log([1 + each.error for each in some]) for some in groups(scored, source_of).values()]
    least, greatest = (exp(_quantile(by_source, share)) for share in (FASTER_RATIO, 1 - SLOWER_RATIO))
    return ErrorBand(
        framework,
        generation,
        len(by_source),
        len(scored),
        round(least, 3),
        round(greatest, 3),
        round(_within_ratio(by_source), 3),
    )


def _quantile(by_source: Sequence[np.ndarray], share: float) -> float:
    """Return the quantile of some sources' values, where every source weighs the same, interpolated between values."""
    values = np.concatenate(by_source)
    weights = np.concatenate([np.full(len(some), 1 / len(some)) for some in by_source])
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    return float(np.interp(share, middles, values))


def _within_ratio(by_source: Sequence[np.ndarray]) -> float:
    """Return the deviation of values from their source's mean over that from the mean of all; 1 for a single source."""
    within = np.mean([np.var(some) for some in by_source])
    between = np.var([np.mean(some) for some in by_source])
    return float(np.sqrt(within / (within + between))) if within + between else 1.0


@dataclass(frozen=True, slots=True)
class LeftOutSource:
    """Rows of one source, and how many of them are inside the bands that the other sources make.

    Attributes:
        inside_after: share of the rows inside the bands once OWN_TRIALS other rows of the source have calibrated the
            estimates, the mean of DRAWS draws; None where fewer than as many rows are left.
        narrowing: width of these bands over that of the bands before, as logarithms.
    """

    source: str
    rows: int
    inside: int
    bands: str
    inside_after: float | None = None
    narrowing: float | None = None

    def document(self) -> dict[str, object]:
        return asdict(self)


def left_out_sources(scored: Sequence[ScoredRow]) -> list[LeftOutSource]:
    """Return for each source how many of its rows are inside the bands of the others; none where there is one source alone."""
    by_source = groups(scored, source_of)
    if len(by_source) < 2:
        return []
    tested = []
    for source, rows in by_source.items():
        bands = bands_of([each for each in scored if source_of(each) != source])
        of_row = [error_band(each.framework, [each.generation], bands) for each in rows]
        inside = sum(
            band.least_ratio <= 1 + each.error <= band.greatest_ratio for band, each in zip(of_row, rows, strict=True)
        )
        names = dict.fromkeys(f"{band.least_ratio:.2f}–{band.greatest_ratio:.2f}" for band in of_row)
        after = _after_own_trials([log(1 + each.error) for each in rows], of_row)
        tested.append(LeftOutSource(source, len(rows), inside, ", ".join(names), *after))
    return tested


def _after_own_trials(errors: Sequence[float], bands: Sequence[ErrorBand]) -> tuple[float, float] | tuple[None, None]:
    """Return the share of rows inside the bands that own trials narrow, and the width of these over that of the bands before.

    Some rows are trials. Their mean error calibrates the others, as one ratio of all seconds.
    """
    if len(errors) < 2 * OWN_TRIALS:
        return None, None
    inside, widths = list[bool](), list[float]()
    for number in range(DRAWS):
        order = np.random.default_rng(number).permutation(len(errors))
        trials = np.array([errors[place] for place in order[:OWN_TRIALS]])
        left_out = (trials - trials.mean()) * OWN_TRIALS / (OWN_TRIALS - 1)  # from the mean of the others
        own = OwnTrials(OWN_TRIALS, float(np.sqrt(np.mean(left_out**2))))
        for place in order[OWN_TRIALS:]:
            band = bands[place].narrowed(own)
            inside.append(band.least_ratio <= exp(errors[place] - trials.mean()) <= band.greatest_ratio)
            widths.append(band.width / bands[place].width)
    return float(np.mean(inside)), float(np.mean(widths))
