"""Which strategies stand the other way round than in the paper, how often, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

CLOSE_RATIO = 1.1
"""Throughputs that differ by less are closer than data sheets can tell apart."""

Rates = Mapping[str, tuple[float, float]]
"""By strategy the published and the predicted throughput of one column."""


@dataclass(frozen=True, slots=True)
class Inversion:
    """A pair of strategies that ours has the other way round.

    Attributes:
        columns: in how many columns; `of` so many in which both have a throughput.
        close: in how many of them ours (or the paper's) are within CLOSE_RATIO.
    """

    better: str
    worse: str
    columns: int
    of: int
    close: int


def inversions_of(columns: Sequence[Rates]) -> list[Inversion]:
    """All such pairs, the most frequent first."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for rates in columns:
        for better, worse in permutations(rates, 2):
            (paper, ours), (other_paper, other) = rates[better], rates[worse]
            counted = counts[better, worse]
            counted[1] += 1
            if paper > other_paper and ours < other:
                counted[0] += 1
                counted[2] += min(paper / other_paper, other / ours) < CLOSE_RATIO
    found = [Inversion(*pair, *counted) for pair, counted in counts.items() if counted[0]]
    return sorted(found, key=lambda inversion: (-inversion.columns, inversion.better, inversion.worse))


def told(inversions: Sequence[Inversion], reasons: Mapping[str, str], *, most: int) -> list[str]:
    """Sentences about the most frequent ones; the reason is that of the first strategy of a pair that has one."""
    sentences = [_sentence(inversion, reasons) for inversion in inversions[:most]]
    rest = inversions[most:]
    if rest:
        columns, close = sum(one.columns for one in rest), sum(one.close for one in rest)
        sentences.append(
            f"{len(rest)} further pairs stand the other way round in {columns} places, {close} of them within "
            f"{CLOSE_RATIO - 1:.0%}."
        )
    return sentences


def _sentence(inversion: Inversion, reasons: Mapping[str, str]) -> str:
    where = f"in {inversion.columns} of {inversion.of} columns"
    head = f"The paper has {inversion.better} before {inversion.worse}, ours the other way round {where}"
    if 2 * inversion.close >= inversion.columns:
        return f"{head}: mostly within {CLOSE_RATIO - 1:.0%} there or here, which data sheets cannot tell apart."
    named = next((reasons[name] for name in (inversion.worse, inversion.better) if name in reasons), None)
    return f"{head}: {named or 'the reason is not known'}."
