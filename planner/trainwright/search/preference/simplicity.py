"""Simplicity: the choice of the least complex among nearly equally good candidates, and a sentence on what it gives up.

Profiles and links are measured to within a few per cent, so estimates cannot rank plans that are closer than that;
complexity can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search.problem import Candidate
from trainwright.strategy import Sharding

Measure = Callable[[Candidate], float]
"""Quantity that is smaller for a better candidate."""
_MIN_REPORTED_RATIO = 0.0005
"""Ratio below which a sentence would say 0.0 %."""


@dataclass(frozen=True, slots=True, order=True)
class Complexity:
    """Complexity of a plan, compared lexicographically.

    Attributes:
        operator_stages: stages with shardings of their operators.
        stage_types: distinct stages by accelerators, degrees, sharding and recompute; what the runtime chooses makes none.
        degrees: distinct pairs of tensor and data degree.
        uneven_stages: stages whose replicas get different numbers of rows.

    The split of layers and the number of stages do not count: between plans that differ in these alone, time decides.
    (Preferring even layers within a tolerance of 3% was tried: with measurements off by 5% it nearly trebled the loss and
    hardly made choices more stable.)
    """

    operator_stages: int
    stage_types: int
    pipelines: int
    degrees: int
    uneven_stages: int
    recomputed_layers: int
    sharded_layers: int
    devices: int

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> Complexity:
        accelerator = {node.name: node.accelerator for node in cluster.nodes}
        runs = [run for stage in plan.stages for run in stage.layers]
        types = {
            (
                frozenset(accelerator[device.node] for device in stage.devices),
                frozenset(
                    (*run.strategy.degrees, run.strategy.sharding, run.strategy.recompute) for run in stage.layers
                ),
            )
            for stage in plan.stages
        }
        return cls(
            operator_stages=sum(stage.operators is not None for stage in plan.stages),
            stage_types=len(types),
            pipelines=len(plan.pipelines),
            degrees=len({run.strategy.degrees for run in runs}),
            uneven_stages=sum(any(len(set(run.rows)) > 1 for run in stage.layers) for stage in plan.stages),
            recomputed_layers=sum(run.count for run in runs if run.strategy.recompute),
            sharded_layers=sum(run.count for run in runs if run.strategy.sharding is not Sharding.NONE),
            devices=len(plan.devices),
        )

    def describe_excess(self, other: Complexity) -> tuple[str, ...]:
        """Describe in which parts this plan is more complex than the other, most important first."""
        return tuple(
            _describe_excess(field.name, mine, others)
            for field, mine, others in zip(fields(self), astuple(self), astuple(other), strict=True)
            if mine > others
        )


_NEEDS = {
    "operator_stages": ("shardings of operators", "stage"),
    "stage_types": ("types of stage", ""),
    "pipelines": ("pipelines", ""),
    "degrees": ("pairs of degrees", ""),
    "uneven_stages": ("uneven rows", "stage"),
    "recomputed_layers": ("recompute", "layer"),
    "sharded_layers": ("sharded weights", "layer"),
    "devices": ("devices", ""),
}
"""Words for each part of the complexity: what it counts, and of what kind of place, if any."""


def _describe_excess(name: str, mine: int, others: int) -> str:
    what, where = _NEEDS[name]
    if not where:
        return f"{mine} {what} in place of {others}"
    return f"{what} in {mine} {where}{'' if mine == 1 else 's'}" + (f" in place of {others}" if others else "")


MAX_NEEDS = 3
"""Maximum number of needs in a sentence, the most important ones."""


@dataclass(frozen=True, slots=True)
class SimplicityTradeOff:
    """Trade-off of the simplest among nearly equal candidates.

    Attributes:
        worse_by_ratio: how much worse than `best` it is, by the measure alone.
        best: the best candidate by the measure alone.
        needs: phrases on the greater complexity of `best`.
    """

    worse_by_ratio: float
    best: Candidate
    needs: tuple[str, ...]

    def describe(self, worse: str = "slower", best: str = "fastest") -> str:
        """Return a sentence such as `0.8% slower by the estimate than the fastest, which needs uneven rows in 3 stages`."""
        listed_needs = self.needs[:MAX_NEEDS]
        listed = " and ".join(
            [", ".join(listed_needs[:-1]), listed_needs[-1]] if len(listed_needs) > 1 else listed_needs
        )
        needs = f", which needs {listed}" if listed else ""
        if self.worse_by_ratio < _MIN_REPORTED_RATIO:
            return f"as {'cheap' if worse == 'dearer' else 'fast'} by the estimate as the {best}{needs}"
        return f"{self.worse_by_ratio:.1%} {worse} by the estimate than the {best}{needs}"


def iteration_seconds(candidate: Candidate) -> float:
    """Return the measure for the objective time."""
    return candidate.estimate.iteration_seconds


def order_by_complexity(
    candidates: Sequence[Candidate],
    tolerance: float,
    cluster: Cluster,
    measure: Measure = iteration_seconds,
    is_running: Callable[[Plan], bool] | None = None,
) -> tuple[list[Candidate], SimplicityTradeOff | None]:
    """Return the candidates in the order of preference, and what the first gives up; None if it is the best.

    Candidates worse than the best by at most `tolerance` come first: the running plan, then ascending complexity, then
    ascending measure. The others follow by their measure. A tolerance of 0 orders by the measure alone, and is stable.
    """
    best_first = sorted(candidates, key=measure)
    if tolerance <= 0 or len(best_first) < 2:
        return best_first, None
    limit = measure(best_first[0]) * (1 + tolerance)
    within_tolerance = [candidate for candidate in best_first if measure(candidate) <= limit]
    order = {
        id(candidate): (is_running is None or not is_running(candidate.plan), Complexity.of(candidate.plan, cluster))
        for candidate in within_tolerance
    }
    chosen = sorted(within_tolerance, key=lambda candidate: order[id(candidate)])
    return [*chosen, *best_first[len(within_tolerance) :]], trade_off(chosen[0], best_first[0], cluster, measure)


def trade_off(
    first: Candidate, best: Candidate, cluster: Cluster, measure: Measure = iteration_seconds
) -> SimplicityTradeOff | None:
    """Return what the first gives up against the best by the measure; None if nothing."""
    worse_by_ratio = measure(first) / measure(best) - 1 if measure(best) > 0 else 0.0
    if worse_by_ratio <= 0:
        return None
    needs = Complexity.of(best.plan, cluster).describe_excess(Complexity.of(first.plan, cluster))
    return SimplicityTradeOff(worse_by_ratio, best, needs)
