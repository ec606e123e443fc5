"""Whose turn it is among the planned trials, and who need not come on at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.experiment import Knowledge, Rule, Verdict, propose
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials, Role


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a trial that has ended: its seconds, or None where it was not measured."""

    seconds: float | None
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A planned trial, and whether it is worth it."""

    trial: PlannedTrial
    is_worth_it: bool = True


def turns(planned: PlannedTrials, tried: Mapping[str, Tried], regret_below: float | None) -> tuple[Turn, ...]:
    """All planned trials in the order in which they are made. `tried` are those that ended, by name, in their order.

    Without `regret_below` that is the order of the document. With it, every baseline keeps its place, and candidates
    that were tried come in the order in which they were. Of the others that one is next with which the expected regret
    falls fastest, by all that is known now; once that is below `regret_below`, they are not worth it.
    """
    if regret_below is None or planned.uncertainty is None:
        return tuple(Turn(trial) for trial in planned.trials)
    numbers = {trial.name: number for number, trial in enumerate(planned.trials)}
    known = _known(planned, {numbers[name]: result for name, result in tried.items()})
    candidates = [number for number, trial in enumerate(planned.trials) if trial.role is Role.CANDIDATE]
    former = [numbers[name] for name in tried if numbers[name] in candidates]
    left = [number for number in candidates if number not in former]
    answer = propose(known, Rule(regret_below, least_gain=0.0), among=left)
    is_worth_it = answer.verdict is Verdict.TRY
    if answer.trial is not None:
        left.remove(answer.trial)
        left.insert(0, answer.trial)
    made = [Turn(planned.trials[number]) for number in former]
    made += [Turn(planned.trials[number], is_worth_it) for number in left]
    coming = iter(made)
    return tuple(next(coming) if trial.role is Role.CANDIDATE else Turn(trial) for trial in planned.trials)


def _known(planned: PlannedTrials, tried: Mapping[int, Tried]) -> Knowledge:
    assert planned.uncertainty is not None
    seconds = [trial.predicted_seconds for trial in planned.trials]
    known = Knowledge.before_trials(seconds, planned.uncertainty.covariance, planned.uncertainty.memory_shares)
    for number, result in tried.items():
        if result.seconds is None:
            known = known.after_failure(number, out_of_memory=result.out_of_memory)
        else:
            known = known.after_seconds(number, result.seconds)
    return known
