"""The attempts at a planned trial, as the cluster holds their results: in a series, alone, alone once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.plan import Plan
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.candidates import digest
from trainwright_operator.flow.gang_progress import stored_result
from trainwright_operator.flow.outcome import GangResult, OutcomeState

IN_SERIES: Final = "s"
ALONE: Final = ""
ONCE_MORE: Final = "b"
_ATTEMPTS: Final = (IN_SERIES, ALONE, ONCE_MORE)
"""By what is put behind the trial's name. Attempts are made in this order, and most trials need but one of them."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that has ended; `gang` is the name that its result is kept under."""

    gang: str
    kind: str
    result: GangResult


@dataclass(frozen=True, slots=True)
class Attempts:
    """Those at one trial that have ended, in their order.

    Attributes:
        is_begun: whether an attempt alone is under way.
    """

    trial: str
    ended: tuple[Attempt, ...] = ()
    is_begun: bool = False

    @classmethod
    def of(cls, book: Book, trial: str) -> Attempts:
        """What the cluster holds of a trial."""
        results = ((kind, stored_result(book, trial + kind)) for kind in _ATTEMPTS)
        ended = tuple(Attempt(trial + kind, kind, result) for kind, result in results if result is not None)
        orders = (book.snapshot.find(book.names.order(trial + kind)) for kind in (ALONE, ONCE_MORE))
        return cls(trial, ended, any(order is not None for order in orders))

    def of_another_plan(self, plan: Plan) -> list[str]:
        """Names of the results that were measured of another plan than the trial's, which a search of another version chose."""
        return [one.gang for one in self.ended if one.result.outcome.tried not in ("", digest(plan))]

    @property
    def following(self) -> str | None:
        """The gang of the next attempt alone; None where what came of the last one stands.

        The failure of a series is not that of each of its plans, so each is tried alone. What is void is tried once
        more: a moment's load is not the plan's fault.
        """
        if not self.ended:
            return self.trial + ALONE
        last = self.ended[-1]
        state = last.result.outcome.state
        voids = sum(attempt.result.outcome.state is OutcomeState.VOID for attempt in self.ended)
        if (last.kind == IN_SERIES and state is OutcomeState.FAILED) or (state is OutcomeState.VOID and voids == 1):
            return self.trial + (ALONE if last.kind == IN_SERIES else ONCE_MORE)
        return None

    @property
    def final(self) -> Attempt | None:
        """The attempt whose result stands; None while there is a further one to make."""
        return self.ended[-1] if self.following is None else None

    @property
    def void(self) -> Attempt | None:
        """A last attempt whose measurement does not count: what there is to tell where no further one can be made."""
        last = self.ended[-1] if self.ended else None
        return last if last is not None and last.result.outcome.state is OutcomeState.VOID else None

    @property
    def device_seconds(self) -> float:
        """What all of them took."""
        return sum(attempt.result.outcome.device_seconds for attempt in self.ended)
