"""Schedule of the planned trials: the attempts at each, which runs next, and which are skipped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from trainwright.trial_selection import ModelUncertainty, Rule, StoppingDecision, TrialPosterior, propose
from trainwright_operator.flow.documents.outcome import GangResult, OutcomeState
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, PlannedTrials, Role
from trainwright_operator.flow.gangs.lifecycle import is_under_way, stored_result
from trainwright_operator.flow.gangs.retries import Retry, find_retry
from trainwright_operator.flow.phase import ReconcileContext

SERIES_SUFFIX: Final = "s"
SINGLE_SUFFIX: Final = ""
RETRY_SUFFIX: Final = "b"
_ATTEMPTS: Final = (SERIES_SUFFIX, SINGLE_SUFFIX, RETRY_SUFFIX)
"""Suffixes of the trial's name, in the order of attempts; most trials need only one."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Finished attempt; `gang` is the name of its result."""

    gang: str
    suffix: str
    result: GangResult


@dataclass(frozen=True, slots=True)
class TrialAttempts:
    """Finished attempts at one trial, oldest first.

    Attributes:
        is_running_alone: whether an attempt without other trials is running.
        lost: last attempts that the cluster ended, of each gang of the trial.
    """

    trial: str
    ended: tuple[Attempt, ...] = ()
    is_running_alone: bool = False
    lost: tuple[Retry, ...] = ()

    @classmethod
    def of(cls, context: ReconcileContext, trial: str) -> TrialAttempts:
        """Read the attempts at a trial from the stored ConfigMaps."""
        results = ((kind, stored_result(context, trial + kind)) for kind in _ATTEMPTS)
        ended = tuple(Attempt(trial + kind, kind, result) for kind, result in results if result is not None)
        alone = any(is_under_way(context, trial + kind) for kind in (SINGLE_SUFFIX, RETRY_SUFFIX))
        retries = (find_retry(context, trial + kind) for kind in _ATTEMPTS)
        return cls(trial, ended, alone, tuple(retry for retry in retries if retry is not None))

    def results_of_other_plans(self, counting: Collection[str]) -> list[str]:
        """Return names of results without one of these digests: of another version's search, or of before an edit."""
        return [attempt.gang for attempt in self.ended if attempt.result.outcome.tried not in ("", *counting)]

    @property
    def next_attempt(self) -> str | None:
        """Return the gang of the next attempt alone, or None where the last result is final.

        A failed series does not say which plan failed, so each is tried alone. A Void trial (ran, does not count) is
        retried once, since transient load may be the cause.
        """
        if not self.ended:
            return self.trial + SINGLE_SUFFIX
        last = self.ended[-1]
        state = last.result.outcome.state
        voids = sum(attempt.result.outcome.state is OutcomeState.VOID for attempt in self.ended)
        if (last.suffix == SERIES_SUFFIX and state is OutcomeState.FAILED) or (
            state is OutcomeState.VOID and voids == 1
        ):
            return self.trial + (SINGLE_SUFFIX if last.suffix == SERIES_SUFFIX else RETRY_SUFFIX)
        return None

    @property
    def final(self) -> Attempt | None:
        """Return the attempt with the final result, or None while another one is due."""
        return self.ended[-1] if self.next_attempt is None else None

    @property
    def void_attempt(self) -> Attempt | None:
        """Return the last attempt if it is Void, to report where no other one can be made."""
        last = self.ended[-1] if self.ended else None
        return last if last is not None and last.result.outcome.state is OutcomeState.VOID else None

    @property
    def device_seconds(self) -> float:
        """Return device seconds of all attempts, those that the cluster ended included."""
        ended = sum(attempt.result.outcome.device_seconds for attempt in self.ended)
        return ended + sum(retry.lost.device_seconds for retry in self.lost)

    @property
    def last_lost(self) -> Retry | None:
        """Return the last attempt that the cluster ended, which the next one waits for."""
        return max(self.lost, key=lambda retry: retry.due_at, default=None)

    def is_due(self, now: datetime) -> bool:
        """Return whether no back-off holds the next attempt up."""
        return all(retry.due_at <= now for retry in self.lost)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of an ended trial: its seconds, or None where it was not measured."""

    seconds: float | None
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class TrialTurn:
    """Planned trial, and whether it is worth running."""

    trial: PlannedTrial
    is_worth_it: bool = True


def next_trials(
    planned: PlannedTrials,
    tried: Mapping[str, TrialResult],
    regret_below: float | None,
    doubts: ModelUncertainty | None = None,
) -> tuple[TrialTurn, ...]:
    """Return all planned trials in execution order. `tried`: results of ended trials by name, oldest first.

    `doubts`: how sure the predicted memory is; without them as of our worker.

    Without `regret_below`, they keep the document's order. With it, baselines keep their places and tried candidates
    come first, oldest first. The next candidate is the one with the largest expected regret reduction (knowledge
    gradient); once the expected regret is below `regret_below`, the remaining ones are not worth running.
    """
    if regret_below is None or planned.uncertainty is None:
        return tuple(TrialTurn(trial) for trial in planned.trials)
    numbers = {trial.name: number for number, trial in enumerate(planned.trials)}
    posterior = _posterior(planned, {numbers[name]: result for name, result in tried.items()}, doubts)
    candidates = [number for number, trial in enumerate(planned.trials) if trial.role is Role.CANDIDATE]
    finished = [numbers[name] for name in tried if numbers[name] in candidates]
    left = [number for number in candidates if number not in finished]
    answer = propose(posterior, Rule(regret_below, least_gain=0.0), among=left)
    is_worth_it = answer.verdict is StoppingDecision.TRY
    if answer.trial is not None:
        left.remove(answer.trial)
        left.insert(0, answer.trial)
    candidate_turns = [TrialTurn(planned.trials[number]) for number in finished]
    candidate_turns += [TrialTurn(planned.trials[number], is_worth_it) for number in left]
    coming = iter(candidate_turns)
    return tuple(next(coming) if trial.role is Role.CANDIDATE else TrialTurn(trial) for trial in planned.trials)


def _posterior(
    planned: PlannedTrials, tried: Mapping[int, TrialResult], doubts: ModelUncertainty | None
) -> TrialPosterior:
    assert planned.uncertainty is not None
    seconds, uncertainty = [trial.predicted_seconds for trial in planned.trials], planned.uncertainty
    posterior = TrialPosterior.before_trials(seconds, uncertainty.covariance, uncertainty.memory_shares, doubts)
    for number, result in tried.items():
        if result.seconds is None:
            posterior = posterior.after_failure(number, out_of_memory=result.out_of_memory)
        else:
            posterior = posterior.after_seconds(number, result.seconds)
    return posterior
