"""Collectives to measure, their comparison with predictions, and the resulting runtime."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainwright.cluster import Cluster
from trainwright.cost.all_to_all import all_to_all
from trainwright.cost.collectives import Collectives
from trainwright.cost.network import Network
from trainwright.model import Model
from trainwright.runtime import IDEAL_RINGS, CollectiveRatios, Runtime
from trainwright.worker_api import CollectiveTime, Overlap


@dataclass(frozen=True, slots=True)
class ComparedCollective:
    """Measured collective and its predicted seconds."""

    measured: CollectiveTime
    predicted_seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured: above 0 if the prediction is too slow."""
        return self.predicted_seconds / self.measured.seconds - 1

    @property
    def off_seconds(self) -> float:
        """Absolute error in seconds."""
        return abs(self.predicted_seconds - self.measured.seconds)


@dataclass(frozen=True, slots=True)
class CollectiveCheck:
    """Errors of predicted collectives.

    Attributes:
        mean_error: absolute, weighted by measured seconds: small messages that are off by their latency hardly matter
            to plans.
        measured_ratio: measured over predicted seconds of all together: above 1 if predictions are too fast.
        worst: the one with the largest absolute error in seconds.
    """

    count: int
    mean_error: float
    measured_ratio: float
    worst: ComparedCollective


def collective_ratios(times: Sequence[CollectiveTime], cluster: Cluster) -> CollectiveRatios:
    """Return by kind measured over ideal seconds, summed over its collectives across several nodes.

    At least 1. Raises ValueError for members that the cluster lacks.
    """
    over_nodes = [time for time in times if len({device.node for device in time.members}) > 1]
    measured: defaultdict[str, float] = defaultdict(float)
    predicted: defaultdict[str, float] = defaultdict(float)
    for collective in _compare(over_nodes, cluster, IDEAL_RINGS):
        measured[collective.measured.collective] += collective.measured.seconds
        predicted[collective.measured.collective] += collective.predicted_seconds
    return CollectiveRatios(
        **{kind: max(measured[kind] / predicted[kind], 1.0) for kind in predicted if predicted[kind]}
    )


def check_collectives(
    times: Sequence[CollectiveTime], cluster: Cluster, ratios: CollectiveRatios = IDEAL_RINGS
) -> CollectiveCheck | None:
    """Compare collectives with their predictions; None if none took any time.

    Each is predicted alone on the cluster's links. Raises ValueError for members that the cluster lacks.
    """
    compared = _compare(times, cluster, ratios)
    if not compared:
        return None
    measured, predicted = (sum(seconds) for seconds in zip(*map(_seconds, compared), strict=True))
    mean = sum(collective.off_seconds for collective in compared) / measured
    ratio = measured / predicted if predicted else math.inf
    return CollectiveCheck(len(compared), mean, ratio, max(compared, key=lambda collective: collective.off_seconds))


def _seconds(compared: ComparedCollective) -> tuple[float, float]:
    return compared.measured.seconds, compared.predicted_seconds


def _compare(
    times: Sequence[CollectiveTime], cluster: Cluster, ratios: CollectiveRatios
) -> tuple[ComparedCollective, ...]:
    for member in {member for time in times for member in time.members}:
        cluster.accelerator_of(member)
    collectives = Collectives(Network(cluster), ratios)
    return tuple(ComparedCollective(time, _predicted(time, collectives)) for time in times if time.seconds > 0)


def _predicted(time: CollectiveTime, collectives: Collectives) -> float:
    groups = (tuple(device.node for device in time.members),)
    ring = collectives.all_reduce(groups)
    match time.collective:
        case "all_reduce":
            return ring.seconds(time.message_bytes)
        case "all_gather":
            return ring.all_gather_seconds(time.message_bytes)
        case "reduce_scatter":
            return ring.reduce_scatter_seconds(time.message_bytes)
        case "all_to_all":
            return all_to_all(groups, collectives.network).of(time.message_bytes) * ring.ratios.exchange


LARGEST_STEP = 16
"""Maximum ratio of consecutive sizes: a ring goes from latency-bound to bandwidth-bound within about two steps."""
MAX_BYTES = 2**28
"""Maximum size; beyond it seconds are proportional to bytes on any link."""
MAX_HALVES_RATIO = 1.1
"""Maximum ratio of an all-gather and a reduce-scatter to an all-reduce at which plans are sequence parallel."""
_VALUE_BYTES = 4
"""Bytes of a gradient element: gradients are reduced in float32."""


def collective_sizes(model: Model) -> tuple[int, ...]:
    """Return bytes of full messages, ascending, in equal ratios of at most `LARGEST_STEP`.

    The smallest is what a tensor group reduces for one row, or a layer's gradients if those are smaller; the largest is
    the gradients of the full model.
    """
    rows = [
        segment.forward_all_reduce_elements_per_row * model.dtype.num_bytes
        for kind in model.kinds
        for segment in kind.segments
        if segment.ends_in_all_reduce
    ]
    gradients = [kind.trained_parameters * _VALUE_BYTES for kind in model.kinds if kind.trained_parameters]
    everything = sum(model.kind_of(layer).trained_parameters for layer in range(len(model.layers))) * _VALUE_BYTES
    sizes = [min(size, MAX_BYTES) for size in (*rows, *gradients, everything) if size]
    if not sizes:
        return ()
    least, most = min(sizes), max(sizes)
    if least == most:
        return (least,)
    steps = max(math.ceil(math.log(most / least) / math.log(LARGEST_STEP)), 1)
    return tuple(dict.fromkeys(round(least * (most / least) ** (step / steps)) for step in range(steps + 1)))


def measured_runtime(
    cluster: Cluster, collectives: Sequence[CollectiveTime] = (), overlaps: Sequence[Overlap] = ()
) -> Runtime:
    """Build the runtime from measurements. Raises ValueError for devices that the cluster lacks."""
    ratios = collective_ratios(collectives, cluster)
    measured = overlap_slowdown(overlaps)
    # gloo reduces everything where a rank needs its part alone.
    halves_ratio = (ratios.all_gather + ratios.reduce_scatter) / 2 / ratios.all_reduce
    runtime = Runtime(collective_ratios=ratios, sequence_parallel=halves_ratio <= MAX_HALVES_RATIO)
    if cluster.is_emulated:
        # Communication does not slow down an emulated device.
        return replace(runtime, overlap_slowdown_ratio=1.0)
    # Ratios below 1 are clock noise: communication makes no computation faster.
    return runtime if measured is None else replace(runtime, overlap_slowdown_ratio=max(measured, 1.0))


def overlap_slowdown(overlaps: Sequence[Overlap]) -> float | None:
    """Return the median over the nodes; None if it was not measured."""
    ratios = [overlap.compute_slowdown_ratio for overlap in overlaps]
    return statistics.median(ratios) if ratios else None
