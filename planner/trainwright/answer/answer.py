"""Answer of the planner as plain values: the candidates, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainwright.bounds import Count, IterationSeconds
from trainwright.layer import Dtype
from trainwright.outside.notebook import ShownInNotebooks
from trainwright.search import Candidate, Problem


class Stop(StrEnum):
    """Cause of a search that ended before its end, so that it may have left better plans out."""

    BUDGET = "budget"
    INTERRUPTION = "interruption"


@dataclass(frozen=True, slots=True)
class SlowFormat:
    """Format that was asked for by name although another one is faster, or some accelerators only emulate it.

    Attributes:
        seconds, rows: iteration and global batch of the best plan.
        other: best plan in the fastest native format; None if it is not faster, or without a data sheet of an accelerator.
    """

    dtype: Dtype
    emulated_on: tuple[str, ...]
    seconds: float
    rows: int
    native: Dtype
    other: Candidate | None


@dataclass(frozen=True, slots=True)
class Baselines:
    """Plans of Megatron's heuristic, which a user would take without a search; None where none fits, or the trainer runs none.

    Attributes:
        of_all: the best one on all devices.
        of_equal: the best one on the devices of the accelerator on which it is fastest.
        accelerator: that accelerator; None if there is but one.
        plans: as many distinct ones as were asked for, best first; further ones are on all devices.
    """

    of_all: Candidate | None = None
    of_equal: Candidate | None = None
    accelerator: str | None = None
    plans: tuple[Candidate, ...] = ()

    @property
    def better(self) -> Candidate | None:
        """Return the faster one of the two."""
        candidates = [candidate for candidate in (self.of_all, self.of_equal) if candidate is not None]
        return min(candidates, key=lambda candidate: candidate.estimate.iteration_seconds, default=None)


@dataclass(frozen=True, slots=True)
class NodeWorth:
    """Answer without the nodes of one accelerator.

    Attributes:
        without_seconds: iteration of the best plan without them; None if none fits.
        slowdown: share by which that is longer than with them; None if none fits. Below 0 where the search found a faster plan
            without them, which it may if its budget ends it.
        price_per_hour: of all of them; None if it is not known.
    """

    accelerator: str
    devices: Count
    without_seconds: IterationSeconds | None
    slowdown: float | None
    price_per_hour: float | None


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Search of the batch size.

    Attributes:
        samples_per_second: of every size that was tried, ascending; 0 where no plan fits.
        may_grow: whether the budget ended it at the largest size, and that is the best one.
    """

    best: int
    samples_per_second: tuple[tuple[int, float], ...]
    may_grow: bool


@dataclass(frozen=True, slots=True)
class Answer(ShownInNotebooks):
    """Candidates of one or several number formats, best first, with the problem of the best one.

    Attributes:
        slow: price of the format, if it was asked for by name and some accelerators only emulate it.
        baselines: if asked for.
        node_worths: of each type of node, if asked for and as far as the budget goes.
        batch_sizes: of each search of the batch size, if it was searched.
        search_seconds: that the search took, without prices, baselines and node worth.
        stopped: what ended the search; None if it came to its end.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    slow: SlowFormat | None = None
    baselines: Baselines | None = None
    node_worths: tuple[NodeWorth, ...] = ()
    batch_sizes: tuple[BatchSizes, ...] = ()
    search_seconds: float = 0.0
    stopped: Stop | None = None

    def __repr__(self) -> str:
        return f"<Answer {self.best!r} of {len(self.candidates)}>"

    @property
    def best(self) -> Candidate:
        """Return the first candidate."""
        return self.candidates[0]
