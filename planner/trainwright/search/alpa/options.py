"""What the intra-operator pass says of one submesh: ways to run any consecutive layers on it, with time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainwright.operator_specs import SpanSpecs
from trainwright.plan import LayerRun
from trainwright.search.alpa.submesh import Submesh
from trainwright.search.spans import Array

UNLIMITED = 2**40
"""Stages from here on where memory sets no limit."""


@dataclass(frozen=True)
class StageStrategy:
    """How a stage runs its layers.

    Attributes:
        runs: by the degrees of the plan document, for the whole stage; none where there are none that could run.
        is_exact: whether these degrees say all; else they are the nearest to what was found.
        operators: what was found operator by operator, for export; None where the degrees are all there is.
    """

    runs: tuple[LayerRun, ...]
    is_exact: bool = True
    operators: SpanSpecs | None = None


@dataclass(frozen=True, eq=False)
class Options:
    """Logical mesh shapes and intra-operator options of one submesh, each for every stage [option, first, end].

    Attributes:
        seconds: forward and backward of one micro-batch (t_l).
        iteration_seconds: what comes once an iteration: sums of gradients, the optimizer.
        state_bytes: what a device holds whatever the pipeline (mem_stage).
        activation_bytes: what it holds for every micro-batch in flight (mem_act).
        copies: [option] of every message into the stage: each tensor rank gets one.
        strategy: of (option, first, end).
    """

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array
    copies: Array
    strategy: Callable[[int, int, int], StageStrategy]

    def amortised(self, micro_batches: int) -> Array:
        """t_intra [option, first, end]: what comes once is spread over the B micro-batches, which B · t counts once."""
        total: Array = self.seconds + self.iteration_seconds / micro_batches
        return total

    def most_stages(self, memory_bytes: float, micro_batches: int) -> NDArray[np.int64]:
        """[option, first, end] how many stages, this one included, may follow by Eq. 5; 0 where it never fits.

        Under 1F1B a stage keeps as many micro-batches as there are stages from it on, but never more than there are.
        """
        fits = np.isfinite(self.seconds) & (self.state_bytes <= memory_bytes)
        room = np.where(fits, memory_bytes - np.where(fits, self.state_bytes, 0.0), 0.0)
        kept = np.floor(room / np.maximum(np.where(fits, self.activation_bytes, 1.0), 1.0))
        return np.where(kept >= micro_batches, UNLIMITED, kept).astype(np.int64)


class Intra(Protocol):
    """The intra-operator pass: the options of a submesh for micro-batches of so many rows; None where there are none."""

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> Options | None: ...


def joined(several: Sequence[Options]) -> Options:
    """The options of all of them."""
    if len(several) == 1:
        return several[0]
    counts = np.cumsum([0, *(len(one.seconds) for one in several)])
    strategies = [one.strategy for one in several]  # tables may go, how they come about stays

    def strategy(option: int, first: int, end: int) -> StageStrategy:
        number = int(np.searchsorted(counts, option, side="right")) - 1
        return strategies[number](option - int(counts[number]), first, end)

    return Options(
        np.concatenate([one.seconds for one in several]),
        np.concatenate([one.iteration_seconds for one in several]),
        np.concatenate([one.state_bytes for one in several]),
        np.concatenate([one.activation_bytes for one in several]),
        np.concatenate([one.copies for one in several]),
        strategy,
    )
