"""What the cost model may have wrong, factor by factor, and by how much each moves the estimate of a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from trainwright.cost.estimate import Breakdown, Estimate, estimate_in
from trainwright.cost.setting import Setting
from trainwright.experiment.belief import Vector
from trainwright.plan import Plan
from trainwright.runtime import ComputeRatio, Runtime


@dataclass(frozen=True, slots=True)
class Doubts:
    """How far off predictions are expected to be: standard deviations of logarithms, that is, shares.

    With these a plan is mispredicted by 5 to 15 % on average before any trial, the more, the more it communicates.

    Attributes:
        whole: of what all plans share.
        accelerator: of the compute seconds of each accelerator by itself.
        link: of every link's bandwidth.
        row_growth: of how compute seconds grow with the rows of a micro-batch.
        part: of each part of an iteration that is not computing: tensor all-reduces, sums of gradients, messages and
            bubbles of pipelines.
        constant: of an iteration's seconds that no part accounts for, as a share of the fastest plan's.
        alike: of what plans share that differ in nothing but which layers and devices their stages have.
        own: of what is a plan's own.
        noise: of measured seconds around the truth.
        memory: of what the peak memory of all plans shares.
        own_memory: of a plan's own peak.
    """

    whole: float = 0.08
    accelerator: float = 0.1
    link: float = 0.3
    row_growth: float = 0.2
    part: float = 0.05
    constant: float = 0.01
    alike: float = 0.015
    own: float = 0.025
    noise: float = 0.015
    memory: float = 0.06
    own_memory: float = 0.02

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not self.own:
            raise ValueError("own must be above 0: no cost model tells every plan exactly from another")


@dataclass(frozen=True, eq=False)
class Loadings:
    """What moves the estimates of some plans.

    Attributes:
        names: of the factors, in words.
        spreads: [factor]: standard deviation of each factor's logarithm.
        values: [plan, factor]: by how much a plan's logarithm moves with one standard deviation of the factor.
    """

    names: tuple[str, ...]
    spreads: Vector
    values: Vector

    @property
    def covariance(self) -> Vector:
        """[plan, plan]: of the logarithms, by these factors alone."""
        return np.asarray(self.values @ self.values.T, dtype=np.float64)


_PARTS: dict[str, tuple[str, ...]] = {
    "tensor all-reduces": ("tensor_sync_seconds",),
    "sums of gradients": ("gradient_sync_seconds", "sharding_seconds", "shared_weight_sync_seconds"),
    "pipelines": ("point_to_point_seconds", "bubble_seconds", "redistribution_seconds"),
}

Change = Callable[[Runtime, float], Runtime]


def loadings_of(plans: Sequence[Plan], estimates: Sequence[Estimate], setting: Setting, doubts: Doubts) -> Loadings:
    """What moves these plans' estimates, and how much.

    Factors of the runtime are tried out: the plan is estimated with the factor one standard deviation up and down, so
    that critical paths that change are seen. Parts weigh by their share of the estimate's breakdown.
    """
    seconds = [estimate.iteration_seconds for estimate in estimates]
    found: list[tuple[str, float, list[float]]] = [("everything", doubts.whole, [doubts.whole] * len(plans))]
    for name, (change, spread) in _changes(setting, doubts).items():
        up, down = (replace(setting, runtime=change(setting.runtime, sign * spread)) for sign in (1, -1))
        moved = [(_log_seconds(plan, up) - _log_seconds(plan, down)) / 2 for plan in plans]
        found.append((name, spread, moved))
    for name, fields in _PARTS.items():
        shares = [_share(estimate.breakdown, fields) for estimate in estimates]
        found.append((name, doubts.part, [doubts.part * share for share in shares]))
    found.append(("a constant", doubts.constant, [doubts.constant * min(seconds) / one for one in seconds]))
    names, spreads, columns = zip(*found, strict=True)
    return Loadings(names, np.array(spreads), np.array(columns, dtype=np.float64).T)


def likeness(plans: Sequence[Plan]) -> Vector:
    """[plan, plan]: 1 where two plans have the same degrees and micro-batches, else 0."""
    kinds = [_kind(plan) for plan in plans]
    return np.array([[float(one == other) for other in kinds] for one in kinds], dtype=np.float64)


def _kind(plan: Plan) -> Hashable:
    return tuple(
        (
            len(pipeline.stages),
            pipeline.micro_batches,
            pipeline.micro_batch_size,
            frozenset(
                (run.tensor, run.data, run.sharding, run.recompute) for stage in pipeline.stages for run in stage.layers
            ),
        )
        for pipeline in plan.pipelines
    )


def _changes(setting: Setting, doubts: Doubts) -> dict[str, tuple[Change, float]]:
    """By name: the runtime with a factor's logarithm moved, and the standard deviation by which it is."""
    names = [accelerator.name for accelerator in setting.cluster.accelerators]
    used = {node.accelerator for node in setting.cluster.nodes}
    by_accelerator: dict[str, tuple[Change, float]] = {
        f"computing of {name}": (lambda runtime, by, name=name: _scaled(runtime, names, name, by), doubts.accelerator)  # type: ignore[misc]
        for name in names
        if name in used
    }
    return {
        **by_accelerator,
        "bandwidth of links": (
            lambda runtime, by: replace(runtime, link_ratio=runtime.link_ratio * exp(by)),
            doubts.link,
        ),
        "growth with the rows": (
            lambda runtime, by: replace(runtime, row_growth_ratio=runtime.row_growth_ratio * exp(by)),
            doubts.row_growth,
        ),
    }


def _scaled(runtime: Runtime, names: Sequence[str], scaled: str, by: float) -> Runtime:
    ratios = {name: runtime.compute_ratio(name) for name in names}
    ratios[scaled] *= exp(by)
    return replace(runtime, compute_ratios=tuple(ComputeRatio(name, ratio) for name, ratio in ratios.items()))


def _log_seconds(plan: Plan, setting: Setting) -> float:
    return log(estimate_in(plan, setting).iteration_seconds)


def _share(breakdown: Breakdown, fields: Sequence[str]) -> float:
    whole = sum(getattr(breakdown, name) for name in breakdown.__slots__)
    return sum(getattr(breakdown, name) for name in fields) / whole if whole else 0.0
