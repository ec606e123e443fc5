"""Timeline of one measured iteration: what every rank did when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from trainwright.document_kind import document

FEWEST_MOMENTS = 8
"""Minimum number of moments that every rank keeps, however large the plan."""


class Action(StrEnum):
    """Activity of a rank.

    Forwards, backwards, waits, gradient reductions and the update follow one another; the others are nested in forwards
    and backwards, except all-gathers of weights after the update.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"
    GRADIENTS = "gradients"
    UPDATE = "update"
    RECOMPUTE = "recompute"
    TENSOR_SUM = "tensor_sum"
    GATHER = "gather"
    MOVE = "move"


class Moment(NamedTuple):
    """Action from start to end; a list in documents, since there are thousands.

    Attributes:
        number: the micro-batch of a forward, a backward or a wait; the index of the rank's reduction; else -1.
        start_microseconds: since the barrier at which the iteration began.
    """

    action: Action
    number: int
    start_microseconds: int
    length_microseconds: int

    @property
    def end_microseconds(self) -> int:
        return self.start_microseconds + self.length_microseconds


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """Actions of one rank by start, enclosing ones before those nested in them.

    Attributes:
        omitted: number of actions left out because there were too many to report.
    """

    node: str
    slot: int
    moments: tuple[Moment, ...]
    omitted: int = 0


@document("Timeline")
@dataclass(frozen=True, slots=True)
class Timeline:
    """Separate measured iteration, after those that count.

    Each rank's clock starts when it leaves the barrier, so moments of different ranks are off by up to the time of a
    small message. On an emulated device a computation lasts as long as the device table says, except recomputation: a
    `recompute` shows how long this machine took.

    Attributes:
        iteration_seconds: the slowest rank's.
        ranks: in the order of the plan's devices.
    """

    iteration_seconds: float
    ranks: tuple[RankTimeline, ...]

    def at_most(self, moments: int) -> Timeline:
        """Limit the timeline to about `moments`, shared among the ranks."""
        each = max(moments // len(self.ranks), FEWEST_MOMENTS)
        kept = [at_most(rank.moments, each) for rank in self.ranks]
        ranks = tuple(
            RankTimeline(rank.node, rank.slot, tuple(few), rank.omitted + len(rank.moments) - len(few))
            for rank, few in zip(self.ranks, kept, strict=True)
        )
        return Timeline(self.iteration_seconds, ranks)


def outermost(moments: Iterable[Moment]) -> list[Moment]:
    """Return the moments that no earlier one encloses; `moments` come in the order of their starts."""
    outer: list[Moment] = []
    for moment in moments:
        if not outer or moment.end_microseconds > outer[-1].end_microseconds:
            outer.append(moment)
    return outer


def at_most(moments: Sequence[Moment], most: int) -> list[Moment]:
    """Limit the moments to `most`: first drop nested ones, then the middle of the iteration.

    A pipeline fills at the iteration's start and drains at its end; in between it repeats itself.
    """
    if len(moments) <= most:
        return list(moments)
    outer = outermost(moments)
    if len(outer) <= most:
        return outer
    head = most - most // 2
    return [*outer[:head], *outer[len(outer) - most // 2 :]]
