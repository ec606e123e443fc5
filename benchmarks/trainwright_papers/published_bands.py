"""Error bands that published runs make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from trainwright.error_bands import ErrorBand
from trainwright_papers.published_scores import ScoredRow


def bands_of(scored: Sequence[ScoredRow]) -> list[ErrorBand]:
    """Return the error bands of all rows, by generation, by kind of plan, and by both."""

    def keys(each: ScoredRow) -> Iterator[tuple[str | None, str | None]]:
        generation = each.generation
        yield from product((None, generation), (None, each.plan_kind))

    ratios: dict[tuple[str | None, str | None], list[float]] = {}
    for each in scored:
        for key in keys(each):
            ratios.setdefault(key, []).append(1 + each.error)
    return [
        ErrorBand(generation, kind, len(some), *(round(float(q), 3) for q in np.quantile(some, (0.1, 0.9))))
        for (generation, kind), some in sorted(ratios.items(), key=lambda item: [name or "" for name in item[0]])
    ]
