"""Status of a gang's ranks at an abort, and the likely cause; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.document_kind import document
from trainwright.plan import Plan
from trainwright.worker_api import Cause, FailureReason
from trainwright_worker.gang.errors import CONSEQUENTIAL_REASONS

_STUCK_SECONDS = 1.0
"""Minimum time in one action before a process is suspected to be stuck."""


@document("Stand")
@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status of one process.

    Attributes:
        place: position in the plan (pipeline, stage, layers), as text.
        seconds: time since the current action began.
        waits: whether the action waits for other processes.
        failure: the process's own failure, unless it is a consequence of a lost peer.
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
class GangStatus:
    """Statuses of a gang's ranks after an abort.

    Attributes:
        devices: all devices of the gang, by rank.
        statuses: statuses posted in time.
        pod_causes: failures posted by launchers, for their pod or for processes that died silently.
    """

    devices: tuple[Device, ...]
    statuses: tuple[RankStatus, ...] = ()
    pod_causes: tuple[Cause, ...] = ()

    @property
    def unresponsive(self) -> tuple[int, ...]:
        """Ranks without a status, ascending: their processes are gone or stopped."""
        return tuple(sorted(set(range(len(self.devices))) - {answer.rank for answer in self.statuses}))

    @property
    def reported_causes(self) -> tuple[Cause, ...]:
        """Failures that processes and launchers posted."""
        return (*self.pod_causes, *(answer.failure for answer in self.statuses if answer.failure is not None))

    def summary(self) -> str:
        """Return a heading and one line per rank."""
        status_by_rank = {answer.rank: answer for answer in self.statuses}
        return "\n".join(
            (
                "status of every rank:",
                *(self._format_rank(rank, status_by_rank.get(rank)) for rank in range(len(self.devices))),
            )
        )

    def _format_rank(self, rank: int, status: RankStatus | None) -> str:
        where = f"  rank {rank} on {self.devices[rank]}"
        if status is None:
            return f"{where}: no answer"
        place = f", {status.place}" if status.place else ""
        waiting = " (waits for others)" if status.waits else ""
        return f"{where}{place}: for {status.seconds:.1f} s: {status.doing}{waiting}"

    def likely_culprit(self) -> str:
        """Return the ranks that a hang waits for, as text: those without a status, else the longest stuck.

        Ranks that do not wait for others come first. Empty if no rank has been stuck for long.
        """
        if self.unresponsive:
            return f"{self.format_ranks(self.unresponsive)} {_do_or_does(self.unresponsive)} not answer"
        stuck = [answer for answer in self.statuses if answer.seconds >= _STUCK_SECONDS]
        if not stuck:
            return ""
        longest = max(stuck, key=lambda answer: (not answer.waits, answer.seconds))
        prefix = "all wait for one another, longest" if longest.waits else "the others wait for"
        return f"{prefix} {self.format_ranks([longest.rank])} (for {longest.seconds:.1f} s: {longest.doing})"

    def format_ranks(self, ranks: Sequence[int], *, max_ranks: int = 8) -> str:
        """Format ranks with their devices."""
        names = [f"rank {rank} on {self.devices[rank]}" for rank in ranks[:max_ranks]]
        return ", ".join(names) + (f" and {len(ranks) - max_ranks} more" if len(ranks) > max_ranks else "")


def root_cause(abort_cause: Cause | None, gang_status: GangStatus) -> Cause | None:
    """Return the root cause of a lost peer, or None if no posted failure explains it.

    A termination posted by a process does not count while ranks are unresponsive: torchrun terminates a pod's processes
    when one of them is gone.
    """
    if abort_cause is not None and abort_cause.reason is not FailureReason.PEER_LOST:
        return abort_cause
    for cause in gang_status.reported_causes:
        if cause.reason not in CONSEQUENTIAL_REASONS:
            return cause
    candidates = gang_status.pod_causes if gang_status.unresponsive else gang_status.reported_causes
    return next((candidate for candidate in candidates if candidate.reason is FailureReason.TERMINATED), None)


def peer_loss_message(cause: Cause | None, gang_status: GangStatus) -> str:
    """Return who is lost and why, as far as known; empty if nothing is known."""
    if cause is not None:
        return f"{_format_origin(cause, gang_status)} ended first ({cause.reason}: {cause.message})"
    if gang_status.unresponsive:
        return f"{gang_status.format_ranks(gang_status.unresponsive)} {_do_or_does(gang_status.unresponsive)} not answer any more"
    return ""


def _format_origin(cause: Cause, gang_status: GangStatus) -> str:
    if cause.node is None:
        return "another process"
    if cause.slot is None:
        return f"the pod on {cause.node}"
    device = Device(cause.node, cause.slot)
    return f"rank {gang_status.devices.index(device)} on {device}" if device in gang_status.devices else str(device)


def _do_or_does(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def format_plan_position(plan: Plan, device: Device) -> str:
    """Return the part of the plan that a device computes, as text; empty if the plan does not use it."""
    for number, pipeline in enumerate(plan.pipelines):
        for stage_index, stage in enumerate(pipeline.stages):
            if device in stage.devices:
                return f"pipeline {number}, stage {stage_index}, layers {stage.first}…{stage.end - 1}"
    return ""
