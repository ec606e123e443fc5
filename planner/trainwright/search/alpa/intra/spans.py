"""What every run of consecutive layers costs on a logical mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.operator_specs import SpanSpecs
from trainwright.search.alpa.intra.description import Assignment

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SpanCosts:
    """Costs by [first, end]: of the layers `first … end - 1`, on each device.

    Arrays have the shape [layers, layers + 1]; inf where end <= first, and, where two goals share a run, where the run
    has but one layer.

    Attributes:
        seconds: forward and backward of one micro-batch with its communication.
        iteration_seconds: once an iteration: sums of gradients and the optimizer.
        state_bytes: weights, gradients and optimizer state, after the rewriting of §4.2.
        activation_bytes: of one micro-batch in flight.
        assignments: of one span: (held, algorithm) of the nodes of every layer's operator graph.
        described: makes a document of the first layer and such assignments.
    """

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array
    assignments: Callable[[int, int], Sequence[Assignment]]
    described: Callable[[int, Sequence[Assignment]], SpanSpecs]

    def strategy(self, first: int, end: int) -> SpanSpecs:
        """How the operators of the layers `first … end - 1` run, and the nearest degrees of the plan document."""
        return self.described(first, self.assignments(first, end))
