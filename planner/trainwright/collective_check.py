"""Measured collectives beside what the cost model says of them: whether the links' figures hold for what plans do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Cluster
from trainwright.cost.collectives import Collectives
from trainwright.cost.fabric import Fabric
from trainwright.orders import CollectiveTime
from trainwright.runtime import IDEAL_RINGS, CollectiveRatios


@dataclass(frozen=True, slots=True)
class ComparedCollective:
    """A measured collective and the seconds that are predicted for it."""

    measured: CollectiveTime
    predicted_seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured: above 0 where the cost model is too slow."""
        return self.predicted_seconds / self.measured.seconds - 1

    @property
    def off_seconds(self) -> float:
        """By how much the prediction misses."""
        return abs(self.predicted_seconds - self.measured.seconds)


@dataclass(frozen=True, slots=True)
class CollectiveCheck:
    """How far predictions of collectives are off.

    Attributes:
        mean_error: of all, the sign left out, each weighed with what it takes: a small message that is off by its latency
            says little of what plans spend.
        worst: the one that is off by most seconds.
    """

    count: int
    mean_error: float
    worst: ComparedCollective


def collective_ratios(times: Sequence[CollectiveTime], cluster: Cluster) -> CollectiveRatios:
    """How much longer each kind took over several nodes than rings on their links, all measured ones of it together.

    At least 1. Raises ValueError for members that the cluster lacks.
    """
    over_nodes = [time for time in times if len({device.node for device in time.members}) > 1]
    measured: defaultdict[str, float] = defaultdict(float)
    predicted: defaultdict[str, float] = defaultdict(float)
    for one in _compare(over_nodes, cluster, IDEAL_RINGS):
        measured[one.measured.collective] += one.measured.seconds
        predicted[one.measured.collective] += one.predicted_seconds
    return CollectiveRatios(
        **{kind: max(measured[kind] / predicted[kind], 1.0) for kind in predicted if predicted[kind]}
    )


def check_collectives(
    times: Sequence[CollectiveTime], cluster: Cluster, ratios: CollectiveRatios = IDEAL_RINGS
) -> CollectiveCheck | None:
    """The check of all these; None where there is none that took any time.

    Each is predicted alone on the cluster's links. Raises ValueError for members that the cluster lacks.
    """
    compared = _compare(times, cluster, ratios)
    if not compared:
        return None
    mean = sum(one.off_seconds for one in compared) / sum(one.measured.seconds for one in compared)
    return CollectiveCheck(len(compared), mean, max(compared, key=lambda one: one.off_seconds))


def _compare(
    times: Sequence[CollectiveTime], cluster: Cluster, ratios: CollectiveRatios
) -> tuple[ComparedCollective, ...]:
    for member in {member for time in times for member in time.members}:
        cluster.accelerator_of(member)
    collectives = Collectives(Fabric(cluster), ratios)
    return tuple(ComparedCollective(time, _predicted(time, collectives)) for time in times if time.seconds > 0)


def _predicted(time: CollectiveTime, collectives: Collectives) -> float:
    ring = collectives.all_reduce((tuple(device.node for device in time.members),))
    match time.collective:
        case "all_reduce":
            return ring.seconds(time.message_bytes)
        case "all_gather":
            return ring.gather_seconds(time.message_bytes)
        case "reduce_scatter":
            return ring.scatter_seconds(time.message_bytes)
