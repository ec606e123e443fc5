"""Where the processes of a gang stood when an alarm was raised, and what that says of its cause. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.orders import Cause, FailureReason
from trainwright.plan import Plan
from trainwright_worker.failures import CONSEQUENCES

_LONG_SECONDS = 1.0
"""A process that began what it does more recently is not suspected to be stuck."""


@dataclass(frozen=True, slots=True)
class Stand:
    """One process.

    Attributes:
        place: which part of the plan it computes, in words.
        seconds: for how long it has been doing what it does.
        waits: whether it waits for others in that.
        failure: its own, where that came first.
    """

    rank: int
    node: str
    slot: int
    place: str
    doing: str
    seconds: float
    waits: bool = False
    failure: Cause | None = None


@dataclass(frozen=True)
class Stands:
    """What the processes of a gang answered to an alarm.

    Attributes:
        devices: of all processes, by rank.
        answers: those that came in time.
        pods: what launchers told of their whole pods or of processes there that could not speak themselves.
    """

    devices: tuple[Device, ...]
    answers: tuple[Stand, ...] = ()
    pods: tuple[Cause, ...] = ()

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks without an answer, ascending: their processes are gone or stopped altogether."""
        return tuple(sorted(set(range(len(self.devices))) - {answer.rank for answer in self.answers}))

    @property
    def told(self) -> tuple[Cause, ...]:
        """What processes and launchers told of their own."""
        return (*self.pods, *(answer.failure for answer in self.answers if answer.failure is not None))

    def summary(self) -> str:
        """A line for each rank, and one above."""
        answers = {answer.rank: answer for answer in self.answers}
        return "\n".join(
            ("where every rank stood:", *(self._line(rank, answers.get(rank)) for rank in range(len(self.devices))))
        )

    def _line(self, rank: int, answer: Stand | None) -> str:
        where = f"  rank {rank} on {self.devices[rank]}"
        if answer is None:
            return f"{where}: no answer"
        place = f", {answer.place}" if answer.place else ""
        waits = " (waits for others)" if answer.waits else ""
        return f"{where}{place}: for {answer.seconds:.1f} s: {answer.doing}{waits}"

    def suspicion(self) -> str:
        """Whom a hang hangs on, in words: who does not answer, else who stands without waiting for others.

        Empty where nobody has stood for long.
        """
        if self.silent:
            return f"{self.named(self.silent)} {_verb(self.silent)} not answer"
        standing = [answer for answer in self.answers if answer.seconds >= _LONG_SECONDS]
        if not standing:
            return ""
        longest = max(standing, key=lambda answer: (not answer.waits, answer.seconds))
        how = "all wait for one another, longest" if longest.waits else "the others wait for"
        return f"{how} {self.named([longest.rank])} (for {longest.seconds:.1f} s: {longest.doing})"

    def named(self, ranks: Sequence[int], *, most: int = 8) -> str:
        """The ranks with their devices."""
        names = [f"rank {rank} on {self.devices[rank]}" for rank in ranks[:most]]
        return ", ".join(names) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def cause_of(alarm: Cause | None, stands: Stands) -> Cause | None:
    """What lies behind a lost peer, or None where nobody that could speak knows.

    A process that was told to end is not the cause while others are silent: its launcher tells it so when a
    process beside it is gone.
    """
    if alarm is not None and alarm.reason is not FailureReason.PEER_LOST:
        return alarm
    for told in stands.told:
        if told.reason not in CONSEQUENCES:
            return told
    ended = stands.pods if stands.silent else stands.told
    return next((told for told in ended if told.reason is FailureReason.TERMINATED), None)


def lost_words(cause: Cause | None, stands: Stands) -> str:
    """Who is lost and why, as far as that is known; empty where nothing is."""
    if cause is not None:
        return f"{_who(cause, stands)} ended first ({cause.reason}: {cause.message})"
    if stands.silent:
        return f"{stands.named(stands.silent)} {_verb(stands.silent)} not answer any more"
    return ""


def _who(cause: Cause, stands: Stands) -> str:
    if cause.node is None:
        return "another process"
    if cause.slot is None:
        return f"the pod on {cause.node}"
    device = Device(cause.node, cause.slot)
    return f"rank {stands.devices.index(device)} on {device}" if device in stands.devices else str(device)


def _verb(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def place_of(plan: Plan, device: Device) -> str:
    """Which part of a plan a device computes, in words; empty where the plan does not use it."""
    for number, pipeline in enumerate(plan.pipelines):
        for place, stage in enumerate(pipeline.stages):
            if device in stage.devices:
                return f"pipeline {number}, stage {place}, layers {stage.first}…{stage.end - 1}"
    return ""
