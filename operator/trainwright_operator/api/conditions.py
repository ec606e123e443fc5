"""Conditions: one for each phase, in the order in which they come true, and the answer."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from trainwright_operator.api.base import StatusModel, Timestamp, cut_to


class ConditionType(StrEnum):
    """Types of conditions. Unknown: not decided yet. False: failed, for the stated reason."""

    ACCEPTED = "Accepted"
    NODES_DISCOVERED = "NodesDiscovered"
    LINKS_MEASURED = "LinksMeasured"
    PROFILED = "Profiled"
    PLANNED = "Planned"
    TRIALS_COMPLETED = "TrialsCompleted"
    SUCCEEDED = "Succeeded"
    SUSPENDED = "Suspended"


class Condition(StatusModel):
    """One condition, as Kubernetes' own conventions have it."""

    type: ConditionType
    """What is said to be true or not, for example Planned."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown (not decided yet)."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation of the spec that this was decided for."""
    last_transition_time: Timestamp
    """When the status last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$")]
    """Why, in one CamelCase word that programs can compare."""
    message: Annotated[str, cut_to(4096), Field(max_length=4096)] = ""
    """Why, in a sentence for people."""
