"""Uncertainty of the cost model by factor, and how far each factor moves a plan's estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Final

import numpy as np

from trainwright.cost.context import CostContext
from trainwright.cost.estimate import Breakdown, Estimate, estimate_with_context
from trainwright.plan import Plan
from trainwright.runtime import ComputeRatio, Runtime
from trainwright.search.candidates import plan_shape
from trainwright.trial_selection.posterior import Vector

FOREIGN_MEMORY: Final = 0.15
"""Deviation of published from predicted peaks, as logarithms, of estimated layers in other frameworks: 0.09 to 0.18 by source."""


@dataclass(frozen=True, slots=True)
class ModelUncertainty:
    """Expected errors of predictions: standard deviations of logarithms, about relative errors.

    With the defaults a plan is mispredicted by 5 to 15 % on average before any trial, the more, the more it
    communicates.

    Attributes:
        whole: of the error that all plans share.
        accelerator: of the compute seconds of each accelerator, independently.
        link: of the bandwidth of all links.
        row_growth: of the growth of compute seconds with the rows of a micro-batch.
        part: of each part of an iteration other than computation: tensor all-reduces, gradient reductions, pipelines'
            messages and bubbles.
        constant: of an iteration's seconds that no part accounts for, as a share of the fastest plan's.
        same_shape: of the error that plans of one shape (`plan_shape`) share.
        own: of the error of a single plan.
        noise: of measured seconds around the truth.
        memory: of the error of peak memory that all plans share, where our worker runs the layers that it measured.
        own_memory: of the error of a single plan's peak.
    """

    whole: float = 0.08
    accelerator: float = 0.1
    link: float = 0.3
    row_growth: float = 0.2
    part: float = 0.05
    constant: float = 0.01
    same_shape: float = 0.015
    own: float = 0.025
    noise: float = 0.015
    memory: float = 0.06
    own_memory: float = 0.02

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not self.own:
            raise ValueError("own must be above 0, got 0; no cost model is exact")

    @classmethod
    def of(cls, context: CostContext) -> ModelUncertainty:
        """Return the expected errors of predictions in a context.

        Memory of estimated layers, or of other trainers, is less sure, unless trials that calibrated the runtime say otherwise.
        """
        is_own = context.profiles.origin == "measured" and context.runtime.trainer is None
        doubts, own = cls() if is_own else cls.of_other_trainers(), context.runtime.own_memory_trials
        return replace(doubts, memory=sqrt(own.remaining_variance(doubts.memory**2))) if own else doubts

    @classmethod
    def of_other_trainers(cls) -> ModelUncertainty:
        """Return the expected errors where another trainer than our worker runs the plans."""
        return cls(memory=FOREIGN_MEMORY)


@dataclass(frozen=True, eq=False)
class FactorLoadings:
    """Effect of each factor on the estimates of some plans.

    Attributes:
        names: for reports.
        spreads: [factor]: standard deviation of each factor's logarithm.
        values: [plan, factor]: change of a plan's logarithm per standard deviation of the factor.
    """

    names: tuple[str, ...]
    spreads: Vector
    values: Vector

    @property
    def covariance(self) -> Vector:
        """`[plan, plan]` covariance of the logarithms by these factors alone."""
        return np.asarray(self.values @ self.values.T, dtype=np.float64)


_PARTS: dict[str, tuple[str, ...]] = {
    "tensor all-reduces": ("tensor_sync_seconds",),
    "sums of gradients": ("gradient_sync_seconds", "sharding_seconds", "shared_weight_sync_seconds"),
    "pipelines": ("point_to_point_seconds", "bubble_seconds", "redistribution_seconds"),
}

Change = Callable[[Runtime, float], Runtime]


def loadings_of(
    plans: Sequence[Plan], estimates: Sequence[Estimate], context: CostContext, doubts: ModelUncertainty
) -> FactorLoadings:
    """Compute how much each factor moves the plans' estimates.

    Factors of the runtime are varied: each plan is estimated with the factor one standard deviation up and down, so
    that changes of the critical path count. Parts weigh by their share of the estimate's breakdown.
    """
    seconds = [estimate.iteration_seconds for estimate in estimates]
    loadings: list[tuple[str, float, list[float]]] = [("everything", doubts.whole, [doubts.whole] * len(plans))]
    for name, (change, spread) in _changes(context, doubts).items():
        up, down = (replace(context, runtime=change(context.runtime, sign * spread)) for sign in (1, -1))
        moved = [(_log_seconds(plan, up) - _log_seconds(plan, down)) / 2 for plan in plans]
        loadings.append((name, spread, moved))
    for name, fields in _PARTS.items():
        shares = [_share(estimate.breakdown, fields) for estimate in estimates]
        loadings.append((name, doubts.part, [doubts.part * share for share in shares]))
    loadings.append(
        ("a constant", doubts.constant, [doubts.constant * min(seconds) / plan_seconds for plan_seconds in seconds])
    )
    names, spreads, columns = zip(*loadings, strict=True)
    return FactorLoadings(names, np.array(spreads), np.array(columns, dtype=np.float64).T)


def same_shape_matrix(plans: Sequence[Plan]) -> Vector:
    """Return `[plan, plan]`: 1 where two plans have the same shape (`plan_shape`), else 0."""
    shapes = [plan_shape(plan) for plan in plans]
    return np.array([[float(shape == other) for other in shapes] for shape in shapes], dtype=np.float64)


def _changes(context: CostContext, doubts: ModelUncertainty) -> dict[str, tuple[Change, float]]:
    """Return by factor a function that shifts its logarithm in a runtime, and its standard deviation."""
    names = [accelerator.name for accelerator in context.cluster.accelerators]
    used = {node.accelerator for node in context.cluster.nodes}
    by_accelerator: dict[str, tuple[Change, float]] = {
        f"computing of {name}": (lambda runtime, by, name=name: _scaled(runtime, names, name, by), doubts.accelerator)  # type: ignore[misc]
        for name in names
        if name in used
    }
    return {
        **by_accelerator,
        "bandwidth of links": (
            lambda runtime, by: replace(
                runtime,
                link_ratio=runtime.link_ratio * exp(by),
                inside_link_ratio=runtime.inside_link_ratio and runtime.inside_link_ratio * exp(by),
            ),
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


def _log_seconds(plan: Plan, context: CostContext) -> float:
    return log(estimate_with_context(plan, context).iteration_seconds)


def _share(breakdown: Breakdown, fields: Sequence[str]) -> float:
    whole = sum(getattr(breakdown, name) for name in breakdown.__slots__)
    return sum(getattr(breakdown, name) for name in fields) / whole if whole else 0.0
