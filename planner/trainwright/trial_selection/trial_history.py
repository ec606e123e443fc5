"""Candidates with their predictions and the trials observed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.calibration import Trial, Trials
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.plan import Plan
from trainwright.trial_selection.knowledge_gradient import TrialPosterior
from trainwright.trial_selection.memory_fit import peak_memory_ratio
from trainwright.trial_selection.model_uncertainty import (
    FactorLoadings,
    ModelUncertainty,
    loadings_of,
    same_shape_matrix,
)


@dataclass(frozen=True, slots=True)
class Observations:
    """Posterior of one uncertain factor.

    Attributes:
        share: relative difference from the cost model's assumption; below 0: smaller.
        deviation: standard deviation of `share`.
    """

    name: str
    share: float
    deviation: float


@dataclass(frozen=True, eq=False)
class TrialHistory:
    """Plans by number: the candidates, then tried plans that are no candidates.

    Attributes:
        prior: by the cost model alone.
        posterior: given the trials.
    """

    plans: tuple[Plan, ...]
    estimates: tuple[Estimate, ...]
    loadings: FactorLoadings
    prior: TrialPosterior
    posterior: TrialPosterior

    @classmethod
    def of(
        cls,
        candidates: Sequence[Plan],
        context: CostContext,
        trials: Trials | None = None,
        doubts: ModelUncertainty | None = None,
    ) -> TrialHistory:
        """Estimate the plans and condition on the trials.

        log(measured / predicted) is a sum of shared factors, of an error shared by plans of one shape, and of
        a plan's own. Every plan is estimated a dozen times. Raises ValueError for a plan that does not belong to the
        context.
        """
        doubts, ran, failed = (
            doubts or ModelUncertainty.of(context),
            trials.trials if trials else (),
            trials.failed if trials else (),
        )
        plans = tuple(dict.fromkeys((*candidates, *(trials.plans if trials else ()))))
        if not plans:
            raise ValueError("no candidate to try; give at least one")
        estimates = tuple(_estimate(plan, number, context) for number, plan in enumerate(plans))
        loadings = loadings_of(plans, estimates, context, doubts)
        covariance = (
            loadings.covariance + doubts.same_shape**2 * same_shape_matrix(plans) + doubts.own**2 * np.eye(len(plans))
        )
        before = TrialPosterior.before_trials(
            [estimate.iteration_seconds for estimate in estimates],
            covariance,
            [peak_memory_ratio(estimate, context) for estimate in estimates],
            doubts,
        )
        number = {plan: index for index, plan in enumerate(plans)}
        posterior = before
        for failure in failed:
            if number[failure.plan] not in posterior.failed:
                posterior = posterior.after_failure(number[failure.plan], out_of_memory=failure.out_of_memory)
        for trial in ran:
            index = number[trial.plan]
            share = _memory_share(trial, estimates[index], context)
            posterior = posterior.after_seconds(index, trial.iteration_seconds, memory_share=share)
        return cls(plans, estimates, loadings, before, posterior)

    @property
    def device_seconds(self) -> tuple[float, ...]:
        """`[plan]` expected device-seconds of an iteration, to which a trial's cost is proportional."""
        seconds = self.posterior.seconds.expected.tolist()
        return tuple(len(plan.devices) * taken for plan, taken in zip(self.plans, seconds, strict=True))

    @property
    def factor_observations(self) -> tuple[Observations, ...]:
        """Posterior of the factors, by their regression on the change of the plans' posterior."""
        prior, now = self.prior.seconds, self.posterior.seconds
        values = self.loadings.values
        weights = np.linalg.solve(prior.covariance, values)
        means = weights.T @ (now.means - prior.means)
        left = np.eye(len(means)) - weights.T @ (prior.covariance - now.covariance) @ weights
        spreads = self.loadings.spreads
        deviations = spreads * np.sqrt(np.maximum(np.diag(left), 0.0))
        shares = np.expm1(spreads * means)
        return tuple(
            Observations(name, float(share), float(deviation))
            for name, share, deviation in zip(self.loadings.names, shares, deviations, strict=True)
        )


def _estimate(plan: Plan, number: int, context: CostContext) -> Estimate:
    try:
        estimate = estimate_with_context(plan, context)
    except ValueError as error:
        raise ValueError(f"plan {number + 1} ({plan.summary()}): {error}") from None
    if not estimate.iteration_seconds or not estimate.peak_memory_bytes:
        raise ValueError(
            f"plan {number + 1} ({plan.summary()}) is predicted to take no time or no memory; check its profiles"
        )
    return estimate


def _memory_share(trial: Trial, estimate: Estimate, context: CostContext) -> float | None:
    """Scale the predicted memory share to the trial's measured peak; None if that was not measured."""
    peaks = [memory.peak_bytes for memory in trial.memory_by_device]
    peak = trial.peak_memory_bytes or max(peaks, default=None)
    return None if peak is None else peak_memory_ratio(estimate, context) * peak / estimate.peak_memory_bytes
