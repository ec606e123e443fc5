"""Published table next to the rebuilt one, and statistics of how well the two agree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

INDISTINGUISHABLE_RATIO = 1.1
"""Throughputs that differ by less are closer than the accuracy of data sheets."""

Record = Mapping[str, Any]
"""One published figure and its prediction, as plain data."""

ReportProgress = Callable[[str, float], None]
"""Takes a description of the current work and the finished share of the table."""

ThroughputPairs = Mapping[str, tuple[float, float]]
"""Published and predicted throughput by strategy, of one column."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Table for the terminal; the first heading is that of the row names."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """Rebuilt table, all of whose predictions are estimated from data sheets.

    Attributes:
        name: name on the command line (`--table`).
        agreement: rank correlations and counts by experiment or column.
        notes: settings that the paper leaves open, and reasons why predictions differ.
    """

    name: str
    title: str
    records: tuple[Record, ...]
    grids: tuple[Grid, ...]
    agreement: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the comparison as plain data for JSON."""
        return {
            "table": self.name,
            "title": self.title,
            "origin": "estimated",
            "agreement": dict(self.agreement),
            "records": [dict(record) for record in self.records],
            "notes": list(self.notes),
        }


def format_figure(value: float | None, digits: int = 2) -> str:
    """Format a figure as the papers print it, or a dash if there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def spearman(published: ArrayLike, predicted: ArrayLike) -> float | None:
    """Return Spearman's rank correlation; equal values share their mean rank.

    Returns None for fewer than three values, or if all values on one side are equal.
    """
    left, right = _ranks(published), _ranks(predicted)
    if len(left) < 3 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last_ranks - (counts - 1) / 2)[inverse]
    return ranks


def geometric_mean_ratio(published: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Return the geometric mean of predicted over published, or None without values."""
    if len(published) == 0:
        return None
    return math.exp(sum(math.log(b / a) for a, b in zip(published, predicted, strict=True)) / len(published))


@dataclass(frozen=True, slots=True)
class MemoryAgreement:
    """Number of plans whose out-of-memory prediction is right and wrong.

    Attributes:
        wrongly_fitting: published as out of memory, predicted to fit.
        wrongly_failing: published with a time, predicted to be out of memory.
    """

    plans: int
    wrongly_fitting: int
    wrongly_failing: int

    @classmethod
    def of(cls, published_fits: Sequence[bool], predicted_fits: Sequence[bool]) -> MemoryAgreement:
        """Count agreements over pairs of plans."""
        pairs = list(zip(published_fits, predicted_fits, strict=True))
        return cls(len(pairs), pairs.count((False, True)), pairs.count((True, False)))

    @property
    def agreeing(self) -> int:
        return self.plans - self.wrongly_fitting - self.wrongly_failing


def inverted_pairs(
    names: Sequence[str], published: Sequence[float], predicted: Sequence[float]
) -> list[tuple[str, str]]:
    """Return pairs (better, worse) by published figures whose predicted order differs; less is better."""
    order = sorted(range(len(names)), key=lambda index: published[index])
    return [
        (names[a], names[b])
        for position, a in enumerate(order)
        for b in order[position + 1 :]
        if published[a] < published[b] and predicted[a] >= predicted[b]
    ]


@dataclass(frozen=True, slots=True)
class Inversion:
    """Pair of strategies whose predicted order is the reverse of the published one.

    Attributes:
        inverted_columns: columns with the reversed order.
        shared_columns: columns in which both strategies have a throughput.
        close_columns: inverted columns where either side differs by less than INDISTINGUISHABLE_RATIO.
    """

    better: str
    worse: str
    inverted_columns: int
    shared_columns: int
    close_columns: int


def count_inversions(columns: Sequence[ThroughputPairs]) -> list[Inversion]:
    """Return all inverted pairs of strategies, most frequent first."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for pairs in columns:
        for better, worse in permutations(pairs, 2):
            (published_better, predicted_better), (published_worse, predicted_worse) = pairs[better], pairs[worse]
            count = counts[better, worse]
            count[1] += 1
            if published_better > published_worse and predicted_better < predicted_worse:
                count[0] += 1
                ratio = min(published_better / published_worse, predicted_worse / predicted_better)
                count[2] += ratio < INDISTINGUISHABLE_RATIO
    inversions = [Inversion(*pair, *count) for pair, count in counts.items() if count[0]]
    return sorted(inversions, key=lambda inversion: (-inversion.inverted_columns, inversion.better, inversion.worse))


def describe_inversions(inversions: Sequence[Inversion], reasons: Mapping[str, str], *, limit: int) -> list[str]:
    """Describe the first `limit` inversions and count the rest; `reasons` are by strategy, better or worse."""
    sentences = [_describe_inversion(inversion, reasons) for inversion in inversions[:limit]]
    rest = inversions[limit:]
    if rest:
        columns = sum(inversion.inverted_columns for inversion in rest)
        close = sum(inversion.close_columns for inversion in rest)
        sentences.append(
            f"{len(rest)} further pairs stand the other way round in {columns} places, {close} of them within "
            f"{INDISTINGUISHABLE_RATIO - 1:.0%}."
        )
    return sentences


def _describe_inversion(inversion: Inversion, reasons: Mapping[str, str]) -> str:
    where = f"in {inversion.inverted_columns} of {inversion.shared_columns} columns"
    head = f"The paper has {inversion.better} before {inversion.worse}, ours the other way round {where}"
    if 2 * inversion.close_columns >= inversion.inverted_columns:
        margin = f"{INDISTINGUISHABLE_RATIO - 1:.0%}"
        return f"{head}: mostly within {margin} there or here, which data sheets cannot tell apart."
    reason = next((reasons[name] for name in (inversion.worse, inversion.better) if name in reasons), None)
    return f"{head}: {reason or 'the reason is not known'}."
