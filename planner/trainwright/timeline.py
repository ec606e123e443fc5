"""What every rank of a plan did when, in one measured iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

FEWEST_MOMENTS = 8
"""That every rank of however large a plan keeps."""


class Action(StrEnum):
    """What a rank does.

    Forwards, backwards, waits, sums of gradients and the update follow one another; the others lie within forwards and
    backwards, but for weights that are collected again behind the update.
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
    """One action from start to end; in a document a list, since there are thousands.

    Attributes:
        number: the micro-batch of a forward, a backward or a wait; which of the rank's sums; else -1.
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
    """One rank's actions in the order of their starts, what encloses others before them.

    Attributes:
        omitted: actions that are left out because there were too many to report.
    """

    node: str
    slot: int
    moments: tuple[Moment, ...]
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A measured iteration of its own, behind those that count.

    Each rank's clock starts where it leaves the barrier, so between ranks moments are off by up to the time that a
    small message takes. On an emulated device a computation lasts as long as the device table says, but for what is
    computed again: a `recompute` shows how long this machine took.

    Attributes:
        iteration_seconds: the slowest rank's.
        ranks: in the order of the plan's devices.
    """

    iteration_seconds: float
    ranks: tuple[RankTimeline, ...]

    def at_most(self, moments: int) -> Timeline:
        """With no more than about so many moments, shared out among the ranks."""
        each = max(moments // len(self.ranks), FEWEST_MOMENTS)
        kept = [at_most(rank.moments, each) for rank in self.ranks]
        ranks = tuple(
            RankTimeline(rank.node, rank.slot, tuple(few), rank.omitted + len(rank.moments) - len(few))
            for rank, few in zip(self.ranks, kept, strict=True)
        )
        return Timeline(self.iteration_seconds, ranks)


def outermost(moments: Iterable[Moment]) -> list[Moment]:
    """Those that no earlier one encloses; `moments` come in the order of their starts."""
    found: list[Moment] = []
    for moment in moments:
        if not found or moment.end_microseconds > found[-1].end_microseconds:
            found.append(moment)
    return found


def at_most(moments: Sequence[Moment], most: int) -> list[Moment]:
    """No more than so many: first without what lies within others, then without the middle of the iteration.

    A pipeline fills at the iteration's start and drains at its end; in between it repeats itself.
    """
    if len(moments) <= most:
        return list(moments)
    outer = outermost(moments)
    if len(outer) <= most:
        return outer
    head = most - most // 2
    return [*outer[:head], *outer[len(outer) - most // 2 :]]
