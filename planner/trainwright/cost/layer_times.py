"""Seconds of one layer on one replica, and overlap of computation with communication.

A segment is the computation of a layer between two tensor all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainwright.cost.collectives import Collective
from trainwright.cost.context import CostContext
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch, on the slowest member of the tensor group.

    If the layer is recomputed, the backward includes a second forward with its all-reduces.
    """

    forward_seconds: float
    forward_sync_seconds: float
    backward_seconds: float
    backward_sync_seconds: float

    @staticmethod
    def slowest(several: Iterable[LayerSeconds]) -> LayerSeconds:
        """Combine replicas that run in lock step: each part takes its maximum."""
        them = tuple(several)
        return LayerSeconds(
            max(one.forward_seconds for one in them),
            max(one.forward_sync_seconds for one in them),
            max(one.backward_seconds for one in them),
            max(one.backward_sync_seconds for one in them),
        )


def layer_seconds(  # noqa: PLR0913 - what a layer's time depends on
    kind: LayerKind,
    *,
    accelerators: Iterable[str],
    tensor: int,
    rows: int,
    recompute: bool,
    collective: Collective,
    context: CostContext,
) -> LayerSeconds:
    """Return the seconds of one layer on one replica; `collective` is the all-reduce of its tensor group.

    Each device computes by its own profile, and all wait for the slowest. The all-reduce of a segment's output follows its
    forward, that of the gradient of its input follows its backward.
    """
    costs = [context.layer_cost(name, kind, tensor, rows) for name in accelerators]
    forward = max(cost.forward_seconds for cost in costs)
    backward = max(cost.backward_seconds for cost in costs)
    forward_sync, backward_sync = sync_seconds(kind, tensor, rows * context.model.dtype.num_bytes, collective)
    if recompute:
        return LayerSeconds(forward, forward_sync, backward + forward, backward_sync + forward_sync)
    return LayerSeconds(forward, forward_sync, backward, backward_sync)


def sync_seconds(kind: LayerKind, tensor: int, bytes_per_element: int, collective: Collective) -> tuple[float, float]:
    """Return the tensor all-reduce seconds of one layer's forward and backward.

    `bytes_per_element` covers the element of all rows.
    """
    forward = backward = 0.0
    if tensor > 1 and kind.is_tensor_parallel:
        for segment in kind.segments:
            forward += collective.seconds(bytes_per_element * segment.forward_all_reduce_elements_per_row)
            backward += collective.seconds(bytes_per_element * segment.backward_all_reduce_elements_per_row)
    return forward, backward


def update_seconds(accelerator: str, run: LayerRun, context: CostContext) -> tuple[float, int]:
    """Return the optimizer seconds of a run on one rank as if nothing was sharded, and the parameters updated.

    A tied weight counts for each of its layers.
    """
    seconds, values = 0.0, 0
    for kind, number in context.kind_counts(run.first, run.end):
        seconds += number * context.layer_cost(accelerator, kind, run.tensor, min(run.rows)).update_seconds
        values += number * context.parameters_per_rank(kind, run.tensor)
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


def overlapped_seconds(passes: Sequence[LayerPass], slowdown_ratio: float) -> tuple[float, float]:
    """Return the seconds of a pass, and the seconds of reductions that are left when it ends.

    While a layer computes, the next layer's weights are all-gathered, then earlier gradients are reduced. Overlapped
    computation and communication take `slowdown_ratio` times as long (Galvatron-BMW, Section V). Nothing overlaps the first
    all-gather.
    """
    seconds, pending_reduce_seconds = (passes[0].gather_seconds if passes else 0.0), 0.0
    for step, following in zip(passes, (*passes[1:], None), strict=True):
        gather = following.gather_seconds if following is not None else 0.0
        hidden = min(step.compute_seconds, gather + pending_reduce_seconds)
        seconds += step.compute_seconds + (slowdown_ratio - 1) * hidden + max(gather - hidden, 0.0) + step.sync_seconds
        pending_reduce_seconds -= max(hidden - gather, 0.0)
        if step.waits_for_reductions:
            seconds += pending_reduce_seconds
            pending_reduce_seconds = 0.0
        pending_reduce_seconds += step.reduce_seconds
    return seconds, pending_reduce_seconds
