"""Progress and failures that a worker reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainwright.bounds import Count
from trainwright.document_kind import document


class FailureReason(StrEnum):
    """Reason of a worker's failure; the operator copies it into the trial's reason."""

    PLACEMENT_NOT_MET = "PlacementNotMet"
    OUT_OF_MEMORY = "OutOfMemory"
    PEER_LOST = "PeerLost"
    HANG = "Hang"
    ORDER_INVALID = "OrderInvalid"
    CRASHED = "Crashed"
    TERMINATED = "Terminated"
    EMULATION_TOO_SLOW = "EmulationTooSlow"
    LOSS_INVALID = "LossInvalid"


@document("Cause")
@dataclass(frozen=True, slots=True)
class Cause:
    """Failure that others followed from, as far as their processes could learn of it."""

    reason: FailureReason
    message: str
    node: str | None = None
    slot: int | None = None


@document("Failure")
@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a process or pod: one reason, one sentence, and where.

    Attributes:
        slot: of the process's device; None if the pod as a whole reports.
        doing: activity of the process.
        cause: failure elsewhere that this one follows from, if known.
    """

    reason: FailureReason
    message: str
    rank: int | None = None
    node: str | None = None
    slot: int | None = None
    doing: str = ""
    cause: Cause | None = None


@document("Progress")
@dataclass(frozen=True, slots=True)
class Progress:
    """Steps (rounds, layer measurements, iterations) that are done, out of `total`."""

    done: Count
    total: Count
    what: str
