"""The next trial, or that there is none worth it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from trainwright.experiment.knowledge import Knowledge

REGRET_BELOW: Final = 0.005
"""Half a per cent: less than what two measurements of one plan differ by."""
_NOTHING: Final = 1e-12


class Verdict(StrEnum):
    """Whether to go on trying, and why not."""

    TRY = "try"
    REGRET_IS_SMALL = "regret-is-small"
    NOTHING_IS_WORTH_IT = "nothing-is-worth-it"
    ALL_TRIED = "all-tried"


@dataclass(frozen=True, slots=True)
class Rule:
    """When to stop.

    Attributes:
        regret_below: stop once the best plan is expected to be slower than the fastest by less than this share.
        least_gain: a trial expected to win less than this share is not worth it.
    """

    regret_below: float = REGRET_BELOW
    least_gain: float = 0.0002

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to do next.

    Attributes:
        trial: number of the plan to try; None: stop.
        best: number of the plan to train with if one stopped now; None where every plan failed.
        regret: by how much `best` is expected to be slower than the plan that is fastest in truth, as a share.
        gain: by how much the trial is expected to speed up the best plan, as a share; 0 of the first trial.
    """

    verdict: Verdict
    trial: int | None
    best: int | None
    regret: float
    gain: float = 0.0


def propose(
    known: Knowledge,
    rule: Rule | None = None,
    costs: Sequence[float] | None = None,
    among: Collection[int] | None = None,
) -> Proposal:
    """The trial with which the expected regret falls most, or most for its cost where `costs` of all plans are given.

    Only plans `among` these are tried, where that is given; the others count in the regret all the same.

    The first trial that runs is the plan believed fastest: something must run before anything can be compared.
    """
    rule = rule or Rule()
    untried = [plan for plan in known.untried if among is None or plan in among]
    if not untried:
        return Proposal(Verdict.ALL_TRIED, None, known.best, known.regret)
    if not known.measured:
        return Proposal(Verdict.TRY, known.first_of(untried), known.best, known.regret)
    if known.regret < rule.regret_below:
        return Proposal(Verdict.REGRET_IS_SMALL, None, known.best, known.regret)
    gains = {plan: known.gain(plan) for plan in untried}
    worth = [plan for plan in untried if gains[plan] >= max(rule.least_gain, _NOTHING)]
    if not worth:
        return Proposal(Verdict.NOTHING_IS_WORTH_IT, None, known.best, known.regret)
    trial = max(worth, key=lambda plan: gains[plan] / (costs[plan] if costs else 1.0))
    return Proposal(Verdict.TRY, trial, known.best, known.regret, gains[trial])
