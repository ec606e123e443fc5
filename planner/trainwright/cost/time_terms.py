"""Seconds of layers, of overlap and of pipelines: each formula once, for the exact estimate and for all searches' tables.

Callers choose the network model by the ring that they pass and the layers that they sum. A segment is the computation of a
layer between two tensor all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from trainwright.cost.collectives import Collective
from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array
from trainwright.cost.messages import stage_messages
from trainwright.layer import LayerKind, TensorSplit
from trainwright.plan import LayerRun
from trainwright.strategy import Sharding

Numbers = TypeVar("Numbers", float, Array)


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroupClass:
    """Class of tensor groups whose layers take equally long.

    Whoever makes them interns them; they are compared by identity, because lookups dominate.

    Attributes:
        accelerators: sorted, distinct names.
        ring: all-reduce of a group by one network model: loaded, alone, or without latency.
    """

    accelerators: tuple[str, ...]
    tensor: int
    ring: Collective


class LayerTerms(NamedTuple, Generic[Numbers]):
    """One layer's seconds and bytes for one micro-batch, on the slowest member of a tensor group: of a kind, or `[kind]`.

    Attributes:
        forward_sync_seconds: tensor collectives of the segments' outputs, each after its forward.
        backward_sync_seconds: those of the gradients of their inputs, each after its backward.
        update_seconds: the optimizer's, as if nothing was sharded.
        activation_bytes: saved for the backward.
    """

    forward_seconds: Numbers
    forward_sync_seconds: Numbers
    backward_seconds: Numbers
    backward_sync_seconds: Numbers
    update_seconds: Numbers
    activation_bytes: Numbers

    @property
    def forward_pass_seconds(self) -> Numbers:
        return self.forward_seconds + self.forward_sync_seconds

    @property
    def backward_pass_seconds(self) -> Numbers:
        return self.backward_seconds + self.backward_sync_seconds


def with_recompute(terms: LayerTerms[Numbers]) -> LayerTerms[Numbers]:
    """Return the terms with a second forward and its all-reduces in the backward."""
    return terms._replace(
        backward_seconds=terms.backward_seconds + terms.forward_seconds,
        backward_sync_seconds=terms.backward_sync_seconds + terms.forward_sync_seconds,
    )


def layer_terms(
    kind: LayerKind, group: TensorGroupClass, rows: int, context: CostContext, split: TensorSplit
) -> LayerTerms[float]:
    """Return the terms of one layer; each device computes by its own profile, and all wait for the slowest."""
    slowest = context.slowest_layer_cost(group.accelerators, kind, split, rows)
    forward_sync, backward_sync = tensor_sync_seconds(kind, group, rows, context, split)
    if context.runtime.overlaps_tensor_sync:
        slowdown = context.runtime.overlap_slowdown_ratio
        forward_sync = overlapped_seconds(forward_sync, min(forward_sync, slowest.forward_seconds), slowdown)
        backward_sync = overlapped_seconds(backward_sync, min(backward_sync, slowest.backward_seconds), slowdown)
    return LayerTerms(
        slowest.forward_seconds,
        forward_sync,
        slowest.backward_seconds,
        backward_sync,
        slowest.update_seconds,
        slowest.activation_bytes,
    )


def kind_table(group: TensorGroupClass, rows: int, context: CostContext) -> LayerTerms[Array]:
    """Return the terms `[kind]` of all layer kinds of the model, in the plans that searches make."""
    rows_of_table = [
        layer_terms(kind, group, rows, context, context.divided_activations.chosen_split(kind, group.tensor))
        for kind in context.model.kinds
    ]
    return LayerTerms(*np.array(rows_of_table, dtype=float).T)


def slowest_terms(several: Iterable[LayerTerms[float]]) -> LayerTerms[float]:
    """Combine replicas that run in lock step: each term takes its maximum."""
    return LayerTerms(*map(max, zip(*several, strict=True)))


def tensor_sync_seconds(
    kind: LayerKind,
    group: TensorGroupClass,
    rows: int,
    context: CostContext,
    split: TensorSplit,
) -> tuple[float, float]:
    """Return the seconds of the tensor collectives of one layer's forward and backward.

    Where the sequence is divided a segment's input is all-gathered and its output reduce-scattered, and so are their gradients
    in turn.
    """
    forward, backward = tensor_all_reduce_bytes(kind, group.tensor, rows, context)
    ring, gathered = group.ring, tensor_all_gather_bytes(kind, group.tensor, rows, context)
    statistics = ring.all_gather_seconds(gathered) if gathered else 0.0
    if split.divides_sequence:
        return (
            sum(map(ring.all_gather_seconds, backward), sum(map(ring.reduce_scatter_seconds, forward), statistics)),
            sum(map(ring.all_gather_seconds, forward), sum(map(ring.reduce_scatter_seconds, backward), 0.0)),
        )
    return sum(map(ring.seconds, forward), statistics), sum(map(ring.seconds, backward), 0.0)


_Messages = tuple[tuple[int, ...], tuple[int, ...]]


def tensor_all_reduce_bytes(kind: LayerKind, tensor: int, rows: int, context: CostContext) -> _Messages:
    """Return the sizes of a layer's tensor all-reduces in forward and backward."""
    computed = context.divided_at(tensor).kind(kind)
    if tensor == 1 or not computed.is_tensor_parallel:
        return (), ()
    size = rows * context.model.dtype.num_bytes
    return (
        tuple(size * s.forward_all_reduce_elements_per_row for s in computed.segments),
        tuple(size * s.backward_all_reduce_elements_per_row for s in computed.segments),
    )


def tensor_all_gather_bytes(kind: LayerKind, tensor: int, rows: int, context: CostContext) -> int:
    """Return the size of what a tensor group gathers in a layer's forward: statistics of logits, of all its ranks."""
    segments = context.divided_at(tensor).kind(kind).segments
    return tensor * rows * sum(segment.forward_gathered_bytes_per_row for segment in segments) if tensor > 1 else 0


def update_seconds(accelerator: str, run: LayerRun, context: CostContext) -> tuple[float, int]:
    """Return the optimizer seconds of a run on one rank as if nothing was sharded, and the parameters updated.

    A tied weight counts for each of its layers.
    """
    seconds, values = 0.0, 0
    for kind, number in context.kind_counts(run.first, run.end):
        seconds += (
            number
            * context.layer_cost(accelerator, kind, TensorSplit(run.strategy.tensor), min(run.rows)).update_seconds
        )
        values += number * context.divided_by(run.strategy).trained_parameters(kind)
    return seconds, values


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Forward or backward of one layer, as a step of a stage's pass.

    Attributes:
        compute_seconds: computation that communication can overlap.
        sync_seconds: tensor all-reduces, which nothing overlaps.
        gather_seconds: all-gather of the layer's sharded weights, which must end before it computes.
        reduce_seconds: reduction of its gradients, which starts when it has computed.
        waits_for_reductions: whether computation waits for earlier reductions before its own starts, so that at most one
            layer's gradients are unsharded (as in FSDP2).
    """

    compute_seconds: float
    sync_seconds: float
    gather_seconds: float = 0.0
    reduce_seconds: float = 0.0
    waits_for_reductions: bool = False


class DataRing(NamedTuple):
    """All-reduces of data groups as arrays that broadcast with the messages' sizes; of several algorithms the fastest counts.

    Attributes:
        latency_seconds: `[algorithm, ...]`.
        seconds_per_byte: `[algorithm, ...]`.
        ratios: `[all-reduce | all-gather | reduce-scatter, ...]`, as in `CollectiveRatios`.
    """

    latency_seconds: Array
    seconds_per_byte: Array
    ratios: Array

    @classmethod
    def of(cls, collective: Collective) -> DataRing:
        ways, ratios = collective.algorithms, collective.ratios
        return cls(
            np.array([way.latency_seconds for way in ways]),
            np.array([way.seconds_per_byte for way in ways]),
            np.array([ratios.all_reduce, ratios.all_gather, ratios.reduce_scatter]),
        )

    def all_reduce_seconds(self, message_bytes: Array, messages: Array | float = 1) -> Array:
        return self._ring_seconds(message_bytes, self.ratios[0], messages)

    def all_gather_seconds(self, message_bytes: Array, messages: Array | float = 1) -> Array:
        return self._ring_seconds(message_bytes, self.ratios[1] / 2, messages)

    def reduce_scatter_seconds(self, message_bytes: Array, messages: Array | float = 1) -> Array:
        return self._ring_seconds(message_bytes, self.ratios[2] / 2, messages)

    def _ring_seconds(self, message_bytes: Array, ratio: Array, messages: Array | float) -> Array:
        pairs = zip(self.latency_seconds, self.seconds_per_byte, strict=True)
        fastest = reduce(np.minimum, (messages * latency + per_byte * message_bytes for latency, per_byte in pairs))
        return np.where(message_bytes > 0, ratio * fastest, 0.0)


def tail_seconds(  # noqa: PLR0913 - what follows the last backward
    values: Array,
    update_seconds: Array,
    ring: DataRing,
    sharding: Sharding,
    *,
    data: Array | int,
    backward_seconds: Array,
    context: CostContext,
    last_reduce_seconds: Array | float = 0.0,
) -> Array:
    """Return seconds after a stage's last backward: gradients reduced, weights updated and, under zero1 and zero2, gathered.

    `values` are the parameters resident on a rank, `update_seconds` as if nothing was sharded. If gradients are reduced during
    the last backward, its `backward_seconds` hide the reduction, but for `last_reduce_seconds` of gradients that come last; a
    forward, at least a third of a recomputed backward, hides the all-gather if the runtime overlaps it.
    """
    is_sharded = sharding is not Sharding.NONE
    overlaps = context.runtime.overlaps_gradients or sharding in {Sharding.ZERO2, Sharding.ZERO3}
    reduce_seconds = ring.reduce_scatter_seconds if is_sharded else ring.all_reduce_seconds
    num_bytes = values * context.gradient_dtype.num_bytes
    reduction = reduce_seconds(num_bytes, stage_messages(values, num_bytes, context))
    hidden = np.clip(reduction - last_reduce_seconds, 0.0, backward_seconds if overlaps else 0.0)
    exposed: Array = overlapped_seconds(reduction, hidden, context.runtime.overlap_slowdown_ratio)
    seconds = exposed + update_seconds / (data if is_sharded else 1)
    if sharding in {Sharding.ZERO1, Sharding.ZERO2}:
        num_bytes = values * context.model.dtype.num_bytes
        gather = ring.all_gather_seconds(num_bytes, stage_messages(values, num_bytes, context))
        hidden = np.minimum(gather, backward_seconds / 3 if context.runtime.overlaps_weight_gathers else 0.0)
        seconds = seconds + overlapped_seconds(gather, hidden, context.runtime.overlap_slowdown_ratio)
    return seconds


def pipeline_seconds(path_seconds: Numbers, longest_seconds: Numbers, micro_batches: int) -> Numbers:
    """Return the seconds of a synchronous pipeline: AMP's Eq. 5, Alpa's Eq. 2, Galvatron-BMW's Eq. 8.

    The first micro-batch takes `path_seconds` through all stages and back; the others follow at the pace of the longest
    stage.
    """
    return path_seconds + (micro_batches - 1) * longest_seconds


def overlapped_seconds(
    communication: Numbers, hidden: Numbers, slowdown_ratio: float, computation: Numbers | float = 0.0
) -> Numbers:
    """Return the seconds of communication that overlaps computation for `hidden` seconds, and of that computation if given.

    While both run, they take `slowdown_ratio` times as long (Galvatron-BMW, Section V).
    """
    return computation + (slowdown_ratio - 1) * hidden + (communication - hidden)


def overlapped_pass_seconds(passes: Sequence[LayerPass], slowdown_ratio: float) -> tuple[float, float]:
    """Return the seconds of a pass, and the seconds of reductions that are left when it ends.

    While a layer computes, the next layer's weights are all-gathered, then earlier gradients are reduced. Nothing overlaps
    the first all-gather.
    """
    seconds, pending_reduce_seconds = (passes[0].gather_seconds if passes else 0.0), 0.0
    for step, following in zip(passes, (*passes[1:], None), strict=True):
        gather = following.gather_seconds if following is not None else 0.0
        hidden = min(step.compute_seconds, gather + pending_reduce_seconds)
        seconds += (
            overlapped_seconds(max(gather, hidden), hidden, slowdown_ratio, step.compute_seconds) + step.sync_seconds
        )
        pending_reduce_seconds -= max(hidden - gather, 0.0)
        if step.waits_for_reductions:
            seconds += pending_reduce_seconds
            pending_reduce_seconds = 0.0
        pending_reduce_seconds += step.reduce_seconds
    return seconds, pending_reduce_seconds


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one forward, or one backward, of a micro-batch.

    Attributes:
        sync_seconds: tensor all-reduces.
        sharding_seconds: all-gathers of sharded weights that computation does not hide, and its slow-down by the hidden ones.
        redistribution_seconds: moving rows between layer runs with different rank layouts.
    """

    compute_seconds: float
    sync_seconds: float = 0.0
    sharding_seconds: float = 0.0
    redistribution_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.sync_seconds + self.sharding_seconds + self.redistribution_seconds


@dataclass(frozen=True, slots=True)
class StageWorker:
    """Worker: replicas that run in lock step, or a whole stage that does.

    Attributes:
        last_backward_seconds: backward of the last micro-batch, which gradient reductions may overlap.
        unfinished_reduce_seconds: seconds of these reductions that are left when it ends.
        first_gather_seconds: by which the first forward takes longer, to gather weights that later passes find gathered.
    """

    forward: PassTime
    backward: PassTime
    last_backward_seconds: float
    unfinished_reduce_seconds: float = 0.0
    first_gather_seconds: float = 0.0
