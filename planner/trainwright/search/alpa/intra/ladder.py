"""Which prices of memory are worth a look: a ladder of goals under which layers are assigned differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trainwright.search.alpa.intra.tables import LayerTable

PRICE_RATIOS: Final = (0.0, *(0.003 * 2.0**step for step in range(15)))
"""Prices of memory that are looked at: what a device's whole memory costs, in times of an iteration's computation shared
evenly by the mesh."""

IN_FLIGHT: Final = (1, 4)
"""Micro-batches in flight that are counted, in turn with every price."""

MOST_PRICES: Final = 5
"""Of those under which layers differ so many are kept, at most, for each count in flight; evenly over the prices."""

MIXED_SHARES: Final = (0.25, 0.5, 0.75)
"""Of a run's layers that follow the faster of two neighbouring prices; the others follow the leaner."""


def ladders(tables: Sequence[LayerTable]) -> list[list[int]]:
    """For every count in flight: numbers of goals under which layers differ, by rising price.

    `tables` are those of a model's layers under the goals (count in flight, price), prices innermost. Goals that no layer
    tells apart share the first one's number.
    """
    parts = np.sum([table.steady() for table in tables], axis=0)
    found: dict[tuple[float, ...], int] = {}
    numbers = [
        found.setdefault(tuple(float(f"{one:.9g}") for one in parts[:, goal]), goal) for goal in range(parts.shape[1])
    ]
    chosen = []
    for count in range(len(IN_FLIGHT)):
        distinct = list(dict.fromkeys(numbers[count * len(PRICE_RATIOS) : (count + 1) * len(PRICE_RATIOS)]))
        steps = np.linspace(0, len(distinct) - 1, min(len(distinct), MOST_PRICES)).round().astype(int)
        chosen.append([distinct[number] for number in steps])
    return chosen
