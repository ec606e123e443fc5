"""Which messages the collectives of a model's plans carry: from a row's activations to all gradients at once."""

from __future__ import annotations

import math

from trainwright.model import Model

LARGEST_STEP = 16
"""Between two sizes: on a ring seconds grow from the latency's to the bandwidth's within about two of them."""
MOST_BYTES = 2**28
"""Beyond it seconds grow in proportion on any link."""
_VALUE_BYTES = 4
"""Gradients are summed in float32."""


def collective_sizes(model: Model) -> tuple[int, ...]:
    """Bytes of whole messages, ascending, in equal ratios of at most `LARGEST_STEP`.

    The smallest is what a tensor group sums of one row where that is less than a layer's gradients; the largest is what
    replicas of the whole model sum.
    """
    rows = [
        segment.forward_all_reduce_elements_per_row * model.dtype.num_bytes
        for kind in model.kinds
        for segment in kind.segments
        if segment.ends_in_all_reduce
    ]
    gradients = [kind.parameters * _VALUE_BYTES for kind in model.kinds if kind.parameters]
    everything = sum(model.kind_of(layer).parameters for layer in range(len(model.layers))) * _VALUE_BYTES
    wanted = [min(size, MOST_BYTES) for size in (*rows, *gradients, everything) if size]
    if not wanted:
        return ()
    least, most = min(wanted), max(wanted)
    if least == most:
        return (least,)
    steps = max(math.ceil(math.log(most / least) / math.log(LARGEST_STEP)), 1)
    return tuple(dict.fromkeys(round(least * (most / least) ** (step / steps)) for step in range(steps + 1)))
