"""A worker's last words, and the failure elsewhere that they may follow from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureReason(StrEnum):
    """Why a worker gave up; the operator writes the same word into the trial's reason."""

    PLACEMENT_NOT_MET = "PlacementNotMet"
    OUT_OF_MEMORY = "OutOfMemory"
    PEER_LOST = "PeerLost"
    HANG = "Hang"
    ORDER_INVALID = "OrderInvalid"
    CRASHED = "Crashed"
    TERMINATED = "Terminated"
    EMULATION_TOO_SLOW = "EmulationTooSlow"


@dataclass(frozen=True, slots=True)
class Cause:
    """The failure that others followed from, as far as those that followed could learn of it."""

    reason: FailureReason
    message: str
    node: str | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's last words: one reason, one sentence, and where.

    Attributes:
        slot: of the process's device; None where a pod speaks as a whole.
        doing: what the process was busy with.
        cause: what went wrong elsewhere first, where this is a consequence and that is known.
    """

    reason: FailureReason
    message: str
    rank: int | None = None
    node: str | None = None
    slot: int | None = None
    doing: str = ""
    cause: Cause | None = None
