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
    """All planned trials in the order in which they are made, by what came of those that were made (by name).

    Without `regret_below` that is the order of the document. With it, every baseline keeps its place, and where it is a
    candidate's turn, it is that of the one with which the expected regret falls fastest; once that is below
    `regret_below`, the remaining candidates are not worth it. The same results give the same order on every pass: what
    was chosen before a result came is chosen again.
    """
    if regret_below is None or planned.uncertainty is None:
        return tuple(Turn(trial) for trial in planned.trials)
    seconds = [trial.predicted_seconds for trial in planned.trials]
    known = Knowledge.before_trials(seconds, planned.uncertainty.covariance, planned.uncertainty.memory_shares)
    rule = Rule(regret_below, least_gain=0.0)
    left = {number for number, trial in enumerate(planned.trials) if trial.role is Role.CANDIDATE}
    found: list[Turn] = []
    is_open, is_worth_it = True, True
    for place, trial in enumerate(planned.trials):
        number = place
        if trial.role is Role.CANDIDATE:
            number = min(left)
            if is_open and is_worth_it:
                answer = propose(known, rule, among=left)
                is_worth_it = answer.verdict is Verdict.TRY
                number = number if answer.trial is None else answer.trial
            left.remove(number)
        chosen = planned.trials[number]
        found.append(Turn(chosen, is_worth_it or chosen.role is Role.BASELINE))
        result = tried.get(chosen.name)
        if result is None:
            is_open = is_open and not found[-1].is_worth_it
        else:
            known = _after(known, number, result)
    return tuple(found)


def _after(known: Knowledge, number: int, tried: Tried) -> Knowledge:
    if tried.seconds is None:
        return known.after_failure(number, out_of_memory=tried.out_of_memory)
    return known.after_seconds(number, tried.seconds)
