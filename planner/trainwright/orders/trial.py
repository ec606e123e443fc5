"""A plan to be tried, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.model import Model
from trainwright.orders.gang import Gang
from trainwright.plan import Plan
from trainwright.timeline import Timeline

MOST_LATE_RATIO = 0.01
"""Of the computations that were paced, so many may have taken longer than the emulated device would."""


@dataclass(frozen=True, slots=True)
class TrialOrder:
    """Train by the plan on synthetic data for some iterations, and time them.

    Attributes:
        track_memory: run one further, untimed iteration that tracks live bytes where the device has no counter of its own.
        fault: a fault to rehearse: `crash` ends rank 0's process after the first iteration, `hang` stops it there,
            `mute` finishes without a report. None in real use.
        timeline: run one further iteration, of which every rank tells what it did when.
        sequence_parallel: whether each rank of a tensor group keeps but a part of the sequence where layers allow it
            (Korthikanti et al. 2022); the losses are the same.
    """

    gang: Gang
    model: Model
    plan: Plan
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    seed: int = 0
    warmup_iterations: int = 3
    iterations: int = 10
    track_memory: bool = True
    fault: Literal["crash", "hang", "mute"] | None = None
    timeline: bool = False
    sequence_parallel: bool = False
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most bytes that a rank held at once: parameters, gradients, optimizer state and activations."""

    node: str
    slot: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A trial's measurement.

    Attributes:
        iteration_seconds: each measured iteration after warm-up, the slowest rank's.
        losses: the mean loss of each iteration, warm-up included; training that works lowers it.
        memory: by rank; empty where it was not tracked.
        paced_segments, late_segments: of emulated devices: computations that were paced, and those among them whose
            real computation took longer than the emulated device would.
        timeline: where it was asked for.
    """

    iteration_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    memory: tuple[RankMemory, ...] = ()
    paced_segments: int = 0
    late_segments: int = 0
    timeline: Timeline | None = None
    kind: Literal["trial"] = "trial"

    @property
    def is_void(self) -> bool:
        """Whether emulated devices were faster than the machine that emulates them: then its seconds mean nothing."""
        return self.late_segments > MOST_LATE_RATIO * self.paced_segments
