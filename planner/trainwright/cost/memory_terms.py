"""Memory formulas that the exact estimate and the tables of all searches share, for numbers and for arrays alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Schedule
from trainwright.strategy import Sharding
from trainwright.training import Optimizer

Values = TypeVar("Values", int, float, NDArray[np.float64])
Bytes = TypeVar("Bytes", float, NDArray[np.float64])

_MOMENTS_BYTES: dict[Optimizer, int] = {"adam": 8, "sgd": 4}
"""Bytes per parameter: two float32 moments, or one."""
_PREFETCHED_BOUNDARIES = 3
"""Boundary tensors per side besides the saved activations: one received ahead, two whose send may be unfinished."""


class StateBytes(NamedTuple, Generic[Values]):
    """Bytes of training state on one rank.

    Attributes:
        optimizer: moments, float32 master weights in half-precision training, and the framework's copies.
        unreduced: where gradients are sharded, those of the largest layer before their reduction.
    """

    weights: Values
    gradients: Values
    optimizer: Values
    unreduced: Values

    @property
    def total(self) -> Values:
        return self.weights + self.gradients + self.optimizer + self.unreduced


class ValueBytes(NamedTuple):
    """Bytes per parameter of weights, gradients, optimizer state and the framework's copies, which nothing divides."""

    weight: int
    gradient: int
    optimizer: int
    copies: float = 0.0

    @classmethod
    def of(cls, model: Model, optimizer: Optimizer, gradient_dtype: Dtype) -> ValueBytes:
        master = 0 if model.dtype is Dtype.FLOAT32 else 4
        return cls(model.dtype.num_bytes, gradient_dtype.num_bytes, _MOMENTS_BYTES[optimizer] + master)

    @property
    def unsharded(self) -> float:
        """Return the bytes per parameter without sharding."""
        return sum(self)

    def unsharded_state(self, trained: Bytes, frozen: Bytes) -> Bytes:
        """Return the bytes of training state without sharding; parameters that are not trained have weights alone."""
        return trained * self.unsharded + frozen * self.weight


def shard_values(values: Values, data: int) -> Values:
    """Return the parameters of one of `data` shards, rounded up to whole ones."""
    return -(-values // data)


def state_bytes(  # noqa: PLR0913 - what training state depends on
    values: Values,
    shard: Values,
    sharding: Sharding,
    per_value: ValueBytes,
    *,
    accumulates: bool = True,
    largest_layer: Values | int = 0,
) -> StateBytes[Values]:
    """Return the bytes of training state of `values` parameters on one rank, which keeps `shard` of them if sharded.

    Gradients that accumulate, over micro-batches or until other pipelines have theirs, are kept whole. Otherwise zero2 and
    zero3 reduce them layer by layer, at most `largest_layer` parameters at once.
    """
    weights = shard if sharding is Sharding.ZERO3 else values
    updated = values if sharding is Sharding.NONE else shard
    gradients, unreduced = values, 0 * values
    if not accumulates and sharding in {Sharding.ZERO2, Sharding.ZERO3}:
        whole = values - shard
        unreduced = np.minimum(whole, largest_layer) if isinstance(whole, np.ndarray) else min(whole, largest_layer)
        gradients = shard
    return StateBytes(
        weights * per_value.weight,
        gradients * per_value.gradient,
        updated * per_value.optimizer + cast("Values", values * per_value.copies if per_value.copies else 0),
        unreduced * per_value.gradient,
    )


def frozen_bytes(frozen: Values, sharding: Sharding, data: int, per_value: ValueBytes) -> Values:
    """Return the bytes of `frozen` parameters on one of `data` replicas: weights in the model's number format alone."""
    return (shard_values(frozen, data) if sharding is Sharding.ZERO3 else frozen) * per_value.weight


def gathered_bytes(layer_values: Sequence[int], per_value: ValueBytes) -> int:
    """Return the bytes of sharded weights while unsharded: of a layer that computes and of the next, gathered ahead."""
    return max(sum(pair) for pair in pairwise((0, *layer_values))) * per_value.weight


@dataclass(frozen=True, slots=True)
class InFlightBytes(Generic[Bytes]):
    """Bytes of each micro-batch in flight, and bytes that count once."""

    per_micro_batch: Bytes
    once: Bytes

    def total(self, in_flight: Bytes | float) -> Bytes:
        return in_flight * self.per_micro_batch + self.once


def activation_bytes(saved: Bytes, inputs: Bytes, largest: Bytes, *, recompute: bool) -> InFlightBytes[Bytes]:
    """Return the activations of layers that save `saved` bytes for the backward.

    Recomputed layers keep their inputs, with the values of buffers that forwards change, plus the activations of one layer at
    a time and its buffers' values of then, at most the `largest`.
    """
    return InFlightBytes(inputs, largest) if recompute else InFlightBytes(saved, 0 * largest)


def boundary_buffer_bytes(entering: Bytes, leaving: Bytes, gathered_output: Bytes | float = 0) -> InFlightBytes[Bytes]:
    """Return the boundary tensors of a stage: outputs kept until their gradient arrives, and messages in transit.

    The message with an output is the output itself, unless the tensor group gathered it along the sequence: then
    `gathered_output`, a rank's slice, is saved besides.
    """
    return InFlightBytes(leaving + gathered_output, _PREFETCHED_BOUNDARIES * (entering + leaving))


def in_flight_micro_batches(schedule: Schedule, micro_batches: int, stage: int, stages: int, chunks: int = 1) -> float:
    """Return the micro-batches in flight at a stage: under 1F1B at most one per stage from this one on, under GPipe all.

    Interleaved stages of v chunks forward 2 (p - i - 1) + (v - 1) p chunks of 1/v stage before the first backward (Megatron's
    schedule): the first of p stages keeps 1 + (p - 1) / (p v) times as many (Korthikanti et al. 2022, section 4.2.3).
    """
    if schedule is Schedule.GPIPE:
        return micro_batches
    if chunks == 1:
        return min(micro_batches, stages - stage)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warm_up + 1, micro_batches * chunks) / chunks
