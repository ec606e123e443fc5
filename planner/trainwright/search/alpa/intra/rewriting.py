"""What becomes of all-reduces after the choice (paper §4.2): a reduce-scatter, and an all-gather behind it.

As many bytes travel, and between the two every device has only its part of what was summed. For gradients that means
that each replica updates its part of the weight alone and keeps only that part's optimizer state, which is what ZeRO
and weight-update sharding do. For activations it means that the trivial operators behind a sum (residual, dropout,
normalisation) work on a part and keep a part, which Megatron calls sequence parallelism. It never costs anything, so the
programme counts beforehand what it saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Which all-reduces are rewritten.

    Attributes:
        gradients: those of gradients.
        activations: those of activations; our runtime does not, so that counting it would promise too much memory.
    """

    gradients: bool = True
    activations: bool = False


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


def scattered_share(sums: Indices, replicas: Array) -> Array:
    """[algorithm] what is left for each device of the work behind a sum of activations; 1 where nothing is summed.

    `sums` are the dimensions over which the leader's output is summed, as bits, and `replicas` by such bits how many
    devices that are: without the rewriting each of them does all of that work.
    """
    left: Array = 1.0 / replicas[sums]
    return left
