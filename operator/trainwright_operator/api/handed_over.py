"""Parts of the status about the job that the winner became."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field, computed_field

from trainwright_operator.api.base import Name, StatusModel, Text, Timestamp
from trainwright_operator.api.spec import LauncherKind


class JobEndReason(StrEnum):
    """Reason why a job of the plan's own ended and is not created again."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"
    MAX_HOURS_REACHED = "MaxHoursReached"


class JobEnd(StatusModel):
    """End of a job of the plan's own."""

    reason: JobEndReason
    """Succeeded, Failed, Deleted (by somebody), or MaxHoursReached (handover.maxHours of the installation)."""
    message: Text
    """The same in a sentence."""
    time: Timestamp
    """When the operator saw it; spec.ttlSecondsAfterFinished counts from then."""


class HandedOverJob(StatusModel):
    """Job that was created with the winner."""

    kind: LauncherKind
    """PyTorchJob or JobSet."""
    names: Annotated[tuple[Name, ...], Field(max_length=1024)]
    """Names of the objects: a PyTorchJob for each node, or one JobSet."""
    config_map: Name
    """Holds the plan and the files that the pods mount. Where the job is yours it is yours too; delete it with the job."""
    owned: bool | None = None
    """Whether the job is this plan's own (handover.allow: Owned of the installation), so that deleting the TrainingPlan, or
    spec.apply: Never, ends it. Absent: it is yours."""
    ended: JobEnd | None = None
    """How the plan's own job ended; absent while it has not."""


class HeldJobState(StrEnum):
    """State of a job of the plan's own that has not ended.

    Suspended: it has no pods, and its queue or a person starts it. Pending: no pod has a node. Running: pods have nodes and
    hold devices. Ending: it is being deleted.
    """

    SUSPENDED = "Suspended"
    PENDING = "Pending"
    RUNNING = "Running"
    ENDING = "Ending"


class HeldJob(StatusModel):
    """Job of the plan's own that has not ended."""

    model_config = ConfigDict(extra="ignore")  # `text` is stored, but derived

    kind: LauncherKind
    """PyTorchJob or JobSet."""
    name: Name
    """Name of the object, or of the first of several."""
    state: HeldJobState
    """Suspended (its queue or a person starts it), Pending (no pod has a node yet), Running, or Ending (being deleted)."""
    since: Timestamp
    """When it was created."""
    devices: Annotated[int, Field(ge=0)]
    """Devices that its pods hold at the moment."""
    ends_at: Timestamp | None = None
    """When handover.maxHours of the installation ends it; absent without that limit, and while no pod holds devices."""
    message: Text | None = None
    """Why it is being ended, and what hinders that; absent while it may go on."""

    @computed_field(description="The same in a few words, for the column.", json_schema_extra={"maxLength": 192})  # type: ignore[prop-decorator]
    @property
    def text(self) -> str:
        devices_text = f", {self.devices} device{'' if self.devices == 1 else 's'}" if self.devices else ""
        return f"{self.state}{devices_text}"
