"""Candidates, what the cost model says of them, and what trials have said since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.cost.estimate import Estimate, estimate_in
from trainwright.cost.setting import Setting
from trainwright.experiment.doubts import Doubts, Loadings, likeness, loadings_of
from trainwright.experiment.knowledge import Knowledge
from trainwright.fitting import Trial, Trials
from trainwright.plan import Plan


@dataclass(frozen=True, slots=True)
class Learnt:
    """What the trials say of one doubtful factor.

    Attributes:
        share: by how much it is larger than the cost model takes it to be; below 0: smaller.
        deviation: how far off that may still be, one standard deviation.
    """

    name: str
    share: float
    deviation: float


@dataclass(frozen=True, eq=False)
class Study:
    """Plans by number: the candidates, and behind them plans that were tried and are no candidates.

    Attributes:
        before: what the cost model alone lets one believe.
        known: with the trials.
    """

    plans: tuple[Plan, ...]
    estimates: tuple[Estimate, ...]
    loadings: Loadings
    before: Knowledge
    known: Knowledge

    @classmethod
    def of(
        cls, candidates: Sequence[Plan], setting: Setting, trials: Trials | None = None, doubts: Doubts | None = None
    ) -> Study:
        """Estimate the plans and take in the trials.

        log(measured / predicted) is a sum of shared factors, of what like plans share and of a plan's own. Every plan is estimated a dozen times. Raises ValueError for one that does not belong to the setting.
        """
        doubts, ran, failed = doubts or Doubts(), trials.trials if trials else (), trials.failed if trials else ()
        plans = tuple(dict.fromkeys((*candidates, *(trials.plans if trials else ()))))
        if not plans:
            raise ValueError("there is no candidate to try")
        estimates = tuple(_estimate(plan, number, setting) for number, plan in enumerate(plans))
        loadings = loadings_of(plans, estimates, setting, doubts)
        covariance = loadings.covariance + doubts.alike**2 * likeness(plans) + doubts.own**2 * np.eye(len(plans))
        before = Knowledge.before_trials(
            [estimate.iteration_seconds for estimate in estimates],
            covariance,
            [_fullest(estimate, setting) for estimate in estimates],
            doubts,
        )
        number = {plan: index for index, plan in enumerate(plans)}
        known = before
        for one in failed:
            if number[one.plan] not in known.failed:
                known = known.after_failure(number[one.plan], out_of_memory=one.out_of_memory)
        for trial in ran:
            index = number[trial.plan]
            share = _memory_share(trial, estimates[index], setting)
            known = known.after_seconds(index, trial.iteration_seconds, memory_share=share)
        return cls(plans, estimates, loadings, before, known)

    @property
    def device_seconds(self) -> tuple[float, ...]:
        """[plan]: what an iteration is expected to hold of devices, which a trial's cost is in proportion to."""
        seconds = self.known.seconds.expected.tolist()
        return tuple(len(plan.devices) * taken for plan, taken in zip(self.plans, seconds, strict=True))

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        """What the trials say of the factors: regression of the factors on what was learnt of the plans."""
        prior, now = self.before.seconds, self.known.seconds
        values = self.loadings.values
        weights = np.linalg.solve(prior.covariance, values)
        means = weights.T @ (now.means - prior.means)
        left = np.eye(len(means)) - weights.T @ (prior.covariance - now.covariance) @ weights
        spreads = self.loadings.spreads
        deviations = spreads * np.sqrt(np.maximum(np.diag(left), 0.0))
        shares = np.expm1(spreads * means)
        return tuple(
            Learnt(name, float(share), float(deviation))
            for name, share, deviation in zip(self.loadings.names, shares, deviations, strict=True)
        )


def _estimate(plan: Plan, number: int, setting: Setting) -> Estimate:
    try:
        found = estimate_in(plan, setting)
    except ValueError as error:
        raise ValueError(f"plan {number + 1} ({plan.summary()}): {error}") from None
    if not found.iteration_seconds or not found.peak_memory_bytes:
        raise ValueError(f"plan {number + 1} ({plan.summary()}) is predicted to take no time or no memory at all")
    return found


def _fullest(estimate: Estimate, setting: Setting) -> float:
    """Share of its memory that the fullest device takes."""
    return max(held / setting.memory_of_node[device.node] for device, held in estimate.memory_by_device)


def _memory_share(trial: Trial, estimate: Estimate, setting: Setting) -> float | None:
    """The same as the trial measured it; None where it did not."""
    peaks = [memory.peak_bytes for memory in trial.memory_by_device]
    peak = trial.peak_memory_bytes or max(peaks, default=None)
    return None if peak is None else _fullest(estimate, setting) * peak / estimate.peak_memory_bytes
