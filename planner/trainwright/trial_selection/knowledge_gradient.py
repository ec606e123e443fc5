"""Knowledge gradient: expected regret reduction of each trial, the stopping rule and the proposal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import sqrt
from typing import Final

import numpy as np

from trainwright.trial_selection.memory_fit import probability_below_one
from trainwright.trial_selection.model_uncertainty import ModelUncertainty
from trainwright.trial_selection.posterior import Posterior, Vector, expected_drop

_DRAWS: Final = 4096
_SEED: Final = 0
"""Fixed seed: regret is an average over draws, and answers must not change between calls."""
_LIKELY: Final = 0.5
_CONTRADICTED: Final = 3.0
"""Standard deviations by which a plan that ran needs more memory than one that ran out of it, beyond which the latter had
reasons of its own.
"""


@dataclass(frozen=True, eq=False)
class TrialPosterior:
    """Posterior of all plans, by number, given the trials so far.

    Attributes:
        seconds: of iteration seconds.
        memory: of the memory share that the fullest device takes; above 1 the plan does not run.
        noise: standard deviation of the logarithm of measured seconds around the truth.
        measured: seconds by plan.
        failed: plans that do not run.
        prior_memory: `memory` before the outcomes; None: without any.
        memory_outcomes: measured memory share by plan, or whether the plan ran out of memory.
    """

    seconds: Posterior
    memory: Posterior
    noise: float
    measured: Mapping[int, float] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()
    prior_memory: Posterior | None = None
    memory_outcomes: Mapping[int, float | bool] = field(default_factory=dict)

    @classmethod
    def before_trials(
        cls,
        predicted_seconds: Sequence[float],
        covariance: Sequence[Sequence[float]] | Vector,
        memory_shares: Sequence[float],
        doubts: ModelUncertainty | None = None,
    ) -> TrialPosterior:
        """Return the prior by predictions alone; `covariance` is of the logarithms of the seconds."""
        doubts = doubts or ModelUncertainty()
        own = doubts.own_memory**2 * np.eye(len(memory_shares))
        return cls(
            Posterior(np.log(predicted_seconds), np.array(covariance, dtype=np.float64)),
            Posterior(np.log(memory_shares), doubts.memory**2 + own),
            doubts.noise,
        )

    def after_seconds(self, plan: int, seconds: float, *, memory_share: float | None = None) -> TrialPosterior:
        """Condition on a trial that ran; `memory_share` is the fullest device's, if measured."""
        informed = self._after_memory(plan, False if memory_share is None else memory_share)
        believed = self.seconds.after_measurement(plan, seconds, noise=self.noise)
        return replace(
            informed, seconds=believed, measured={**self.measured, plan: seconds}, failed=self.failed - {plan}
        )

    def after_failure(self, plan: int, *, out_of_memory: bool) -> TrialPosterior:
        """Record a trial that did not run; if it ran out of memory, the others are likelier to, as well.

        They are not, if a plan that is predicted to need far more ran.
        """
        informed = self._after_memory(plan, True) if out_of_memory else self
        return replace(informed, failed=self.failed | {plan})

    def _after_memory(self, plan: int, outcome: float | bool) -> TrialPosterior:
        prior, outcomes = self.prior_memory or self.memory, {**self.memory_outcomes, plan: outcome}
        memory = prior
        for number, share in outcomes.items():
            if not isinstance(share, bool):
                memory = memory.after_measurement(number, share, noise=0.0)
        ran = [number for number, share in outcomes.items() if share is not True]
        bounds = {
            number: share
            for number, share in outcomes.items()
            if isinstance(share, bool) and not (share and _is_contradicted(number, ran, prior))
        }
        memory = memory.after_memory_outcomes(bounds)
        return replace(self, memory=memory, prior_memory=prior, memory_outcomes=outcomes)

    @property
    def untried(self) -> list[int]:
        return [
            plan for plan in range(len(self.seconds.means)) if plan not in self.measured and plan not in self.failed
        ]

    @cached_property
    def fit_probability(self) -> Vector:
        """`[plan]` probability that the plan fits into memory."""
        spread = zip(self.memory.means.tolist(), self.memory.deviations.tolist(), strict=True)
        probabilities = [probability_below_one(mean, deviation) for mean, deviation in spread]
        probabilities = [
            1.0 if plan in self.measured else 0.0 if plan in self.failed else p for plan, p in enumerate(probabilities)
        ]
        return np.array(probabilities, dtype=np.float64)

    @property
    def best(self) -> int | None:
        """Plan to train with if there were no further trial: the one expected fastest of those that ran.

        Before any ran, the first to try. None if all failed.
        """
        if self.measured:
            return self._fastest(self.measured)
        return self.first_of(self.untried)

    def first_of(self, plans: Collection[int]) -> int | None:
        """Return the plan expected fastest of those that likely fit, else the likeliest to fit; None without plans."""
        likely = [plan for plan in plans if self.fit_probability[plan] >= _LIKELY]
        return (
            self._fastest(likely)
            if likely
            else max(plans, key=lambda plan: float(self.fit_probability[plan]), default=None)
        )

    def expected_gain(self, plan: int) -> float:
        """Return how much a trial of an untried plan is expected to lower the logarithm of the best plan's seconds.

        Afterwards one can choose that plan, if it fits, or any that ran before; the measurement informs about all of
        them (the knowledge gradient of Frazier, Powell and Dayanik 2009 over the plans that will have been measured). 0
        before any plan ran: the first trial is chosen by its own expectation.
        """
        if not self.measured:
            return 0.0
        choices = [*self.measured, plan]
        levels = self.seconds.means[choices]
        slopes = self.seconds.slopes(plan, noise=self.noise)[choices]
        nearer = float(np.min(levels[:-1]) - np.min(levels))
        return float(self.fit_probability[plan]) * (nearer + expected_drop(levels, slopes))

    @cached_property
    def regret(self) -> float:
        """Expected log ratio of the best plan's seconds to those of the plan that is truly fastest.

        About a relative difference; 0 if there is no plan to choose.
        """
        if self.best is None:
            return 0.0
        draw = np.random.default_rng(_SEED)
        shape = (_DRAWS, len(self.seconds.means))
        values = self.seconds.sample(draw.standard_normal(shape))
        runs = draw.random(shape) < self.fit_probability
        runs[:, self.best] = True
        least = np.min(np.where(runs, values, np.inf), axis=1)
        return float(np.mean(values[:, self.best] - least))

    def _fastest(self, plans: Iterable[int]) -> int:
        return min(plans, key=lambda plan: (float(self.seconds.means[plan]), plan))


def _is_contradicted(plan: int, ran: Collection[int], prior: Posterior) -> bool:
    """Return whether a plan ran that is predicted to need far more memory."""
    means, covariance = prior.means, prior.covariance
    return any(
        means[other] - means[plan]
        > _CONTRADICTED * sqrt(covariance[plan, plan] + covariance[other, other] - 2 * covariance[plan, other])
        for other in ran
    )


REGRET_BELOW: Final = 0.005
"""Half a per cent: less than two measurements of one plan differ by."""
_NOTHING: Final = 1e-12


class StoppingDecision(StrEnum):
    """Decision to try a plan, or the reason to stop."""

    TRY = "try"
    REGRET_IS_SMALL = "regret-is-small"
    NOTHING_IS_WORTH_IT = "nothing-is-worth-it"
    ALL_TRIED = "all-tried"


@dataclass(frozen=True, slots=True)
class Rule:
    """Stopping rule.

    Attributes:
        regret_below: stop once the best plan is expected to be slower than the fastest by less than this share.
        least_gain: minimum expected gain of a trial, as a share.
    """

    regret_below: float = REGRET_BELOW
    least_gain: float = 0.0002

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Proposal:
    """Next trial, or the decision to stop.

    Attributes:
        trial: number of the plan to try; None: stop.
        best: number of the plan to train with without further trials; None if every plan failed.
        regret: expected slowdown of `best` against the plan that is truly fastest, as a share.
        gain: expected speed-up of the best plan by the trial, as a share; 0 for the first trial.
    """

    verdict: StoppingDecision
    trial: int | None
    best: int | None
    regret: float
    gain: float = 0.0


def propose(
    posterior: TrialPosterior,
    rule: Rule | None = None,
    costs: Sequence[float] | None = None,
    among: Collection[int] | None = None,
) -> Proposal:
    """Propose the trial that lowers the expected regret most, or most per cost if `costs` of all plans are given.

    Only plans in `among` are tried, if given; the others still count in the regret. The first trial is the plan
    expected fastest: comparisons need one that ran.
    """
    rule = rule or Rule()
    untried = [plan for plan in posterior.untried if among is None or plan in among]
    if not untried:
        return Proposal(StoppingDecision.ALL_TRIED, None, posterior.best, posterior.regret)
    if not posterior.measured:
        return Proposal(StoppingDecision.TRY, posterior.first_of(untried), posterior.best, posterior.regret)
    if posterior.regret < rule.regret_below:
        return Proposal(StoppingDecision.REGRET_IS_SMALL, None, posterior.best, posterior.regret)
    gains = {plan: posterior.expected_gain(plan) for plan in untried}
    worth = [plan for plan in untried if gains[plan] >= max(rule.least_gain, _NOTHING)]
    if not worth:
        return Proposal(StoppingDecision.NOTHING_IS_WORTH_IT, None, posterior.best, posterior.regret)
    trial = max(worth, key=lambda plan: gains[plan] / (costs[plan] if costs else 1.0))
    return Proposal(StoppingDecision.TRY, trial, posterior.best, posterior.regret, gains[trial])
