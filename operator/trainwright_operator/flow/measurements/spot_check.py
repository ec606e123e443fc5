"""Spot check of reused profiles: one layer on each node, as the trials time it, against the figures that were kept.

Emulated devices are not checked: their device table says how fast they are, and it is part of the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from trainwright.layer import Dtype
from trainwright.profiles import LayerProfile
from trainwright.worker_api import CheckedLayer, ProfilingReport, ProfilingTask
from trainwright_operator.flow.measurements.measurement_keys import KeptProfile, layer_digest

MAX_DRIFT: Final = 0.15
"""Largest difference from a kept figure, as a share of it, that counts as none: devices of one type differ by several per
cent, and medians are known within 2 %."""


@dataclass(frozen=True, slots=True)
class ExpectedLayer:
    """Layer that is checked on the nodes of an accelerator.

    Attributes:
        seconds: kept figures, by the name of the node that was measured; empty where that is gone. One of each node.
    """

    accelerator: str
    dtype: Dtype
    kind: str
    rows: int
    seconds: tuple[tuple[str, float], ...]

    def drift(self, checked: CheckedLayer) -> float:
        """Return a figure over the nearest of those of its node, or of any node where its own is not known."""
        own = [seconds for node, seconds in self.seconds if node == checked.node]
        ratios = (checked.seconds / seconds for seconds in own or [seconds for _, seconds in self.seconds])
        return min(ratios, key=lambda ratio: abs(ratio - 1.0))


def choose_layer(
    task: ProfilingTask, layers: Sequence[LayerProfile], kept: Iterable[tuple[str, KeptProfile, ProfilingReport]]
) -> ExpectedLayer | None:
    """Return the layer of a reused profile that takes most of an iteration, at most rows; None where none is checked.

    `kept`: every kept report of the task's key, the newest first, with the name of its node; some may be of other layers of
    the same names.
    """
    if task.tensor_degree > 1 or task.gang.is_emulated or not layers:
        return None
    counts = Counter(task.model.layers)
    longest = max(layers, key=lambda layer: counts[layer.kind] * _seconds(layer))
    same = longest.kind, layer_digest(task.model, task.model.kind(longest.kind))
    choices = [
        (node, _seconds(layer))
        for node, key, report in kept
        if same in key.layers
        for layer in report.layers
        if (layer.kind, layer.rows) == (longest.kind, longest.rows) and _seconds(layer) > 0
    ]
    newest = dict(reversed(choices))
    seconds = tuple(newest.items())
    accelerator = task.gang.nodes[0].accelerator
    return ExpectedLayer(accelerator, task.model.dtype, longest.kind, longest.rows, seconds) if seconds else None


def _seconds(layer: LayerProfile) -> float:
    return layer.forward_seconds + layer.backward_seconds
