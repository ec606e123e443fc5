"""How plans run on a cluster, as far as measuring its links tells: what the search goes by and predictions are made with."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainwright.cluster import Cluster
from trainwright.collective_check import collective_ratios
from trainwright.orders import CollectiveTime, Overlap
from trainwright.runtime import Runtime


def measured_runtime(
    cluster: Cluster, collectives: Sequence[CollectiveTime] = (), overlaps: Sequence[Overlap] = ()
) -> Runtime:
    """The runtime on the cluster, given what was measured. Raises ValueError for devices that the cluster lacks."""
    ratios = collective_ratios(collectives, cluster)
    measured = overlap_slowdown(overlaps)
    if cluster.is_emulated:
        # An emulated device keeps the pace of its table, whatever it sends meanwhile.
        return Runtime(collective_ratios=ratios, overlap_slowdown_ratio=1.0)
    if measured is None:
        return Runtime(collective_ratios=ratios)
    # Below 1 is the clock's scatter: communication makes no computation faster.
    return Runtime(collective_ratios=ratios, overlap_slowdown_ratio=max(measured, 1.0))


def overlap_slowdown(overlaps: Sequence[Overlap]) -> float | None:
    """The median of the nodes; None where it was not measured."""
    ratios = [overlap.compute_slowdown_ratio for overlap in overlaps]
    return statistics.median(ratios) if ratios else None
