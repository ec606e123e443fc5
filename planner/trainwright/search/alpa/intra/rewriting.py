"""What becomes of all-reduces after the choice (paper §4.2): a reduce-scatter, and an all-gather behind it.

As many bytes travel, and between the two every device has only its part of what was summed. For gradients that means
that each replica updates its part of the weight alone and keeps only that part's optimizer state, which is what ZeRO
and weight-update sharding do. It never costs anything, so the programme's memory counts it beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ValueBytes:
    """Bytes for each value of a weight.

    Attributes:
        used: the weight as it is used.
        gradient: its gradient, whole until the last micro-batch.
        update: what only the optimizer needs: its moments, and float32 weights in half-precision training.
    """

    used: int
    gradient: int
    update: int


@dataclass(frozen=True)
class WeightState:
    """What devices hold and update of a weight, by [algorithm].

    Attributes:
        used, gradient, updated: values on each device of the weight, its gradient, and of what its optimizer updates.
    """

    used: Array
    gradient: Array
    updated: Array

    def state_bytes(self, sizes: ValueBytes) -> Array:
        """All that is held from one iteration to the next."""
        return sizes.used * self.used + sizes.gradient * self.gradient + sizes.update * self.updated


def weight_state(values: Array, replicas: Array, *, rewritten: bool, gathered: bool) -> WeightState:
    """Of `values` on each device, which as many replicas hold alike.

    `rewritten` shares the update among replicas; `gathered` shares the weight itself, which is whole only in use.
    """
    part = values / replicas
    return WeightState(part if gathered else values, values, part if rewritten or gathered else values)
