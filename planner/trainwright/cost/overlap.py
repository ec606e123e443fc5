"""Computation and communication that run at the same time, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of a pass, in the order in which the pass meets it.

    Attributes:
        compute_seconds: what other communication can run beside.
        sync_seconds: tensor all-reduces, which nothing runs beside.
        gather_seconds: collecting the layer's sharded weights, which must be over before it computes.
        reduce_seconds: summing its gradients, which begins when it has computed.
        waits_for_sums: whether it begins only when those before are over, and computation stands still until then: so
            no more than one layer's gradients are there whole (as in FSDP2).
    """

    compute_seconds: float
    sync_seconds: float
    gather_seconds: float = 0.0
    reduce_seconds: float = 0.0
    waits_for_sums: bool = False


def walk(steps: Sequence[Step], slowdown_ratio: float) -> tuple[float, float]:
    """Seconds of a pass, and seconds of reductions that are left when it ends.

    The weights of the next layer are gathered while a layer computes, then reductions of earlier layers go on; while
    both run, computation and communication take `slowdown_ratio` times as long (Galvatron-BMW, Section V). The first
    gather has nothing to hide behind.
    """
    seconds, left = (steps[0].gather_seconds if steps else 0.0), 0.0
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        gather = following.gather_seconds if following is not None else 0.0
        hidden = min(step.compute_seconds, gather + left)
        seconds += step.compute_seconds + (slowdown_ratio - 1) * hidden + max(gather - hidden, 0.0) + step.sync_seconds
        left -= max(hidden - gather, 0.0)
        if step.waits_for_sums:
            seconds += left
            left = 0.0
        left += step.reduce_seconds
    return seconds, left
