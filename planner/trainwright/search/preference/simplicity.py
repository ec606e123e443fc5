"""Which of the candidates that are about equally good: the simplest, and what that gives up, in words.

Profiles and links are measured to within a few per cent, so that plans nearer to each other than that are not told
apart by their estimates. What tells them apart then is how much there is to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from trainwright.cluster import Cluster
from trainwright.plan import Plan, Sharding
from trainwright.search.protocol import Candidate

Measure = Callable[[Candidate], float]
"""What a better candidate has less of."""


@dataclass(frozen=True, slots=True, order=True)
class Simplicity:
    """How much there is to a plan. Of two the simpler has less of the first of these in which they differ.

    Attributes:
        stage_types: distinct stages by accelerators, degrees, sharding and recompute.
        pipelines: how many there are.
        degrees: distinct pairs of tensor and data degree.
        uneven_stages: stages whose replicas get different numbers of rows.
        recomputed_layers, sharded_layers: over all pipelines.
        devices: used.

    How layers are split is not among them, nor how many stages there are: plans that differ in that alone are equally
    simple, and time decides. (Evening out layers within a tolerance of 3% was tried: under measurements that were off by
    5% it nearly trebled what is lost and hardly made choices change less often.)
    """

    stage_types: int
    pipelines: int
    degrees: int
    uneven_stages: int
    recomputed_layers: int
    sharded_layers: int
    devices: int

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> Simplicity:
        accelerator = {node.name: node.accelerator for node in cluster.nodes}
        stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        runs = list(chain.from_iterable(stage.layers for stage in stages))
        types = {
            (
                frozenset(accelerator[device.node] for device in stage.devices),
                frozenset((run.tensor, run.data, run.sharding, run.recompute) for run in stage.layers),
            )
            for stage in stages
        }
        return cls(
            stage_types=len(types),
            pipelines=len(plan.pipelines),
            degrees=len({(run.tensor, run.data) for run in runs}),
            uneven_stages=sum(any(len(set(run.rows)) > 1 for run in stage.layers) for stage in stages),
            recomputed_layers=sum(run.count for run in runs if run.recompute),
            sharded_layers=sum(run.count for run in runs if run.sharding is not Sharding.NONE),
            devices=sum(len(stage.devices) for stage in stages),
        )

    def needs_beyond(self, other: Simplicity) -> tuple[str, ...]:
        """What there is more of here than in the other, in words, the weightiest first."""
        return tuple(
            _NEEDS[name](getattr(self, name), getattr(other, name))
            for name in (field.name for field in fields(self))
            if getattr(self, name) > getattr(other, name)
        )


def _in_place_of(what: str) -> Callable[[int, int], str]:
    return lambda mine, others: f"{mine} {what} in place of {others}"


def _in(what: str, where: str) -> Callable[[int, int], str]:
    return lambda mine, others: (
        f"{what} in {mine} {where}{'' if mine == 1 else 's'}" + (f" in place of {others}" if others else "")
    )


_NEEDS: dict[str, Callable[[int, int], str]] = {
    "stage_types": _in_place_of("types of stage"),
    "pipelines": _in_place_of("pipelines"),
    "degrees": _in_place_of("pairs of degrees"),
    "uneven_stages": _in("uneven rows", "stage"),
    "recomputed_layers": _in("recompute", "layer"),
    "sharded_layers": _in("sharded weights", "layer"),
    "devices": _in_place_of("devices"),
}
MOST_NEEDS = 3
"""So many of them are told; the others weigh less."""


@dataclass(frozen=True, slots=True)
class Trade:
    """What the simplest of nearly equal candidates gives up.

    Attributes:
        behind_ratio: by how much it is worse than the best by the measure alone.
        best: that one.
        needs: what the best would have needed, in words.
    """

    behind_ratio: float
    best: Candidate
    needs: tuple[str, ...]

    def words(self, worse: str = "slower", best: str = "fastest") -> str:
        """`0.8% slower by the estimate than the fastest, which needs uneven rows in 3 stages`."""
        told = self.needs[:MOST_NEEDS]
        listed = " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
        needs = f", which needs {listed}" if listed else ""
        return f"{self.behind_ratio:.1%} {worse} by the estimate than the {best}{needs}"


def iteration_seconds(candidate: Candidate) -> float:
    """The measure where time is the objective."""
    return candidate.estimate.iteration_seconds


def prefer(
    candidates: Sequence[Candidate],
    tolerance: float,
    cluster: Cluster,
    measure: Measure = iteration_seconds,
    running: Plan | None = None,
) -> tuple[list[Candidate], Trade | None]:
    """The candidates in the order of preference, and what the first gives up; None where it is the best anyway.

    Those that are worse than the best by at most `tolerance` come first: of them the plan that runs now, if it is
    among them, then the simplest (`Simplicity`), equally simple ones by the measure; then the rest by the measure. A
    tolerance of 0 leaves the order of the measure as it is, equal ones in the order in which they were given.
    """
    best_first = sorted(candidates, key=measure)
    if tolerance <= 0 or len(best_first) < 2:
        return best_first, None
    limit = measure(best_first[0]) * (1 + tolerance)
    near = [candidate for candidate in best_first if measure(candidate) <= limit]
    order = {id(one): (one.plan != running, Simplicity.of(one.plan, cluster)) for one in near}
    chosen = sorted(near, key=lambda candidate: order[id(candidate)])
    return [*chosen, *best_first[len(near) :]], trade(chosen[0], best_first[0], cluster, measure)


def trade(first: Candidate, best: Candidate, cluster: Cluster, measure: Measure = iteration_seconds) -> Trade | None:
    """What the first gives up against the best by the measure; None where it gives up nothing."""
    behind = measure(first) / measure(best) - 1 if measure(best) > 0 else 0.0
    if behind <= 0:
        return None
    needs = Simplicity.of(best.plan, cluster).needs_beyond(Simplicity.of(first.plan, cluster))
    return Trade(behind, best, needs)
