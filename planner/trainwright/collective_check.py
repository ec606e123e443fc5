"""Measured collectives beside what the cost model says of them: whether the links' figures hold for what plans do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Cluster
from trainwright.cost.collectives import all_reduce_seconds
from trainwright.cost.fabric import Fabric
from trainwright.orders import CollectiveTime


@dataclass(frozen=True, slots=True)
class ComparedCollective:
    """A measured collective and the seconds that are predicted for it."""

    measured: CollectiveTime
    predicted_seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured: above 0 where the cost model is too slow."""
        return self.predicted_seconds / self.measured.seconds - 1


@dataclass(frozen=True, slots=True)
class CollectiveCheck:
    """How far predictions of collectives are off.

    Attributes:
        mean_error: of all, the sign left out.
        worst: the one that is furthest off.
    """

    count: int
    mean_error: float
    worst: ComparedCollective


def check_collectives(times: Sequence[CollectiveTime], cluster: Cluster) -> CollectiveCheck | None:
    """The check of all these; None where there is none that took any time.

    Each is predicted alone on the cluster's links. A reduce-scatter or an all-gather is half an all-reduce. Raises
    ValueError for members that the cluster lacks.
    """
    for member in {member for time in times for member in time.members}:
        cluster.accelerator_of(member)
    fabric = Fabric(cluster)
    compared = [compare(time, fabric) for time in times if time.seconds > 0]
    if not compared:
        return None
    mean = statistics.fmean(abs(one.error) for one in compared)
    return CollectiveCheck(len(compared), mean, max(compared, key=lambda one: abs(one.error)))


def compare(time: CollectiveTime, fabric: Fabric) -> ComparedCollective:
    """One of them."""
    share = 1.0 if time.collective == "all_reduce" else 0.5
    return ComparedCollective(time, share * all_reduce_seconds(time.members, time.message_bytes, fabric))
