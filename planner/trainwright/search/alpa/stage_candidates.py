"""Candidate stages: spans of layers on submeshes with their Pareto-optimal options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import LayerRun
from trainwright.search.alpa.submeshes import Submesh

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageCandidates:
    """Columns of all stage candidates (cluster span, submesh slot, option) that are Pareto-optimal in time and memory.

    Attributes:
        first, end: cluster boundaries of the stage.
        size: devices.
        min_devices_before, max_devices_before: bounds on the devices that all earlier stages use together.
        seconds: t_intra of one micro-batch.
        max_remaining_stages: most stages from this one to the last, itself included, for which it fits in memory (Eq.
            5).
        message_copies: copies of every message into the stage that cross one link.
        slot, option: indices of the submesh slot and of its option.
    """

    first: Indices
    end: Indices
    size: Indices
    min_devices_before: Indices
    max_devices_before: Indices
    seconds: Array
    max_remaining_stages: Indices
    message_copies: Array
    slot: Indices
    option: Indices

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> StageCandidates:
        return StageCandidates(
            self.first[chosen],
            self.end[chosen],
            self.size[chosen],
            self.min_devices_before[chosen],
            self.max_devices_before[chosen],
            self.seconds[chosen],
            self.max_remaining_stages[chosen],
            self.message_copies[chosen],
            self.slot[chosen],
            self.option[chosen],
        )

    def in_slot(self, low: int, high: int, slot: int) -> StageCandidates:
        """Return the same stages for one submesh slot."""
        like = np.ones_like(self.first)
        return replace(self, min_devices_before=low * like, max_devices_before=high * like, slot=slot * like)


def pareto_candidates(
    seconds: Array, max_stages: Indices, size: int, message_copies: Array | None = None
) -> StageCandidates:
    """Return a submesh's options `[option, first, end]` that are Pareto-optimal in time and memory.

    `message_copies` is `[option]`, 1 by default.
    """
    order = np.argsort(seconds, axis=0, kind="stable")
    ascending = np.take_along_axis(max_stages, order, axis=0)
    before = np.zeros_like(ascending)
    np.maximum.accumulate(ascending[:-1], axis=0, out=before[1:])
    kept, first, end = np.nonzero(ascending > before)
    option = order[kept, first, end]
    nothing = np.zeros(len(first), dtype=np.int64)
    return StageCandidates(
        first=first.astype(np.int64),
        end=end.astype(np.int64),
        size=nothing + size,
        min_devices_before=nothing,
        max_devices_before=nothing,
        seconds=seconds[option, first, end],
        max_remaining_stages=max_stages[option, first, end],
        message_copies=np.ones(len(first)) if message_copies is None else message_copies[option],
        slot=nothing,
        option=option.astype(np.int64),
    )


def concatenate_candidates(parts: Sequence[StageCandidates]) -> StageCandidates:
    """Join stage candidates, sorted by first boundary."""
    merged = StageCandidates(
        np.concatenate([part.first for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([part.size for part in parts]),
        np.concatenate([part.min_devices_before for part in parts]),
        np.concatenate([part.max_devices_before for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.max_remaining_stages for part in parts]),
        np.concatenate([part.message_copies for part in parts]),
        np.concatenate([part.slot for part in parts]),
        np.concatenate([part.option for part in parts]),
    )
    return merged[np.argsort(merged.first, kind="stable")]


UNLIMITED_STAGES = 2**40
"""Number of remaining stages that stands for no limit by memory."""


@dataclass(frozen=True)
class StageStrategy:
    """Parallelisation of one stage's layers.

    Attributes:
        runs: degrees of the plan document for the whole stage; empty if none can run.
        is_exact: whether the degrees express the solution exactly, not only approximately.
        operators: operator specs for export; None if the degrees are exact.
    """

    runs: tuple[LayerRun, ...]
    is_exact: bool = True
    operators: SpanSpecs | None = None


@dataclass(frozen=True, eq=False)
class SubmeshOptions:
    """Logical mesh shapes and intra-operator options of one submesh, as `[option, first, end]` costs of every stage.

    Attributes:
        seconds: forward and backward of one micro-batch (t_l).
        iteration_seconds: gradient reduction and optimizer step of one iteration.
        state_bytes: bytes per device that do not depend on the pipeline (mem_stage).
        activation_bytes: bytes per device for each micro-batch in flight (mem_act).
        message_copies: `[option]` copies of every message into the stage: one, or one per tensor rank if they are not split.
        strategy: function of (option, first, end).
    """

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array
    message_copies: Array
    strategy: Callable[[int, int, int], StageStrategy]

    def amortised_seconds(self, micro_batches: int) -> Array:
        """Return t_intra `[option, first, end]`, with per-iteration seconds spread over the B micro-batches."""
        total: Array = self.seconds + self.iteration_seconds / micro_batches
        return total

    def max_remaining_stages(self, memory_bytes: float, micro_batches: int) -> NDArray[np.int64]:
        """Return `[option, first, end]` the most stages from this one to the last by Eq. 5, 0 if it never fits.

        Under 1F1B a stage has one micro-batch in flight per remaining stage, at most B.
        """
        fits = np.isfinite(self.seconds) & (self.state_bytes <= memory_bytes)
        room = np.where(fits, memory_bytes - np.where(fits, self.state_bytes, 0.0), 0.0)
        in_flight = np.floor(room / np.maximum(np.where(fits, self.activation_bytes, 1.0), 1.0))
        return np.where(in_flight >= micro_batches, UNLIMITED_STAGES, in_flight).astype(np.int64)


class IntraOperatorPass(Protocol):
    """Intra-operator pass: a submesh's options for micro-batches of `rows` rows, None if it has none."""

    def options(self, submesh: Submesh, rows: int, micro_batches: int) -> SubmeshOptions | None: ...


def concatenate_options(parts: Sequence[SubmeshOptions]) -> SubmeshOptions:
    """Join the options of one submesh."""
    if len(parts) == 1:
        return parts[0]
    counts = np.cumsum([0, *(len(part.seconds) for part in parts)])
    strategies = [part.strategy for part in parts]  # so that the closure does not keep the tables alive

    def strategy(option: int, first: int, end: int) -> StageStrategy:
        number = int(np.searchsorted(counts, option, side="right")) - 1
        return strategies[number](option - int(counts[number]), first, end)

    return SubmeshOptions(
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.iteration_seconds for part in parts]),
        np.concatenate([part.state_bytes for part in parts]),
        np.concatenate([part.activation_bytes for part in parts]),
        np.concatenate([part.message_copies for part in parts]),
        strategy,
    )
