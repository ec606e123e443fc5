"""Record of the job that a winner became: the ConfigMap that its pods mount, with the objects as they were decided.

Its annotations tell how far a job of the plan's own is: whether its objects were created, for how long it held devices,
and why it ends. So whatever interrupts the operator, the next pass goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

from trainwright_operator.api.handed_over import JobEndReason
from trainwright_operator.api.installation import HandoverRule
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.documents.stored_documents import stored_time
from trainwright_operator.flow.names import (
    HELD_BEFORE_ANNOTATION,
    HELD_SINCE_ANNOTATION,
    JOB_END_ANNOTATION,
    JOBS_CREATED_ANNOTATION,
    handover_name,
)
from trainwright_operator.flow.snapshot import Snapshot, StoredConfigMap

MANIFESTS_KEY: Final = "manifests.json"


class Clearing(StrEnum):
    """Reason why a plan's own job is deleted so that there may be another one."""

    APPLY_NEVER = "ApplyNever"
    SUSPENDED = "Suspended"


class JobObject(NamedTuple):
    """Kind and name of an object of the job."""

    kind: LauncherKind
    name: str


@dataclass(frozen=True, slots=True)
class EndMark:
    """Reason why a job of the plan's own ends or ended, and since when it is known."""

    reason: JobEndReason | Clearing
    time: datetime
    words: str = ""

    def text(self) -> str:
        """Return the annotation's value."""
        return f"{self.reason} {self.time.isoformat()} {self.words}".rstrip()

    @classmethod
    def parse(cls, text: str) -> EndMark | None:
        """Return the mark, or None where the text is none."""
        word, _, rest = text.partition(" ")
        time, _, words = rest.partition(" ")
        moment = stored_time(time)
        reasons: dict[str, JobEndReason | Clearing] = {member.value: member for member in (*JobEndReason, *Clearing)}
        return EndMark(reasons[word], moment, words) if word in reasons and moment is not None else None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Record as stored."""

    stored: StoredConfigMap

    @classmethod
    def of(cls, snapshot: Snapshot) -> JobRecord | None:
        """Return the plan's record, or None where there is none."""
        config_map = snapshot.find(handover_name(snapshot.plan.name, snapshot.plan.uid))
        return JobRecord(config_map) if config_map is not None else None

    @property
    def objects(self) -> tuple[JobObject, ...]:
        """Return what the job consists of; nothing where the ConfigMap was modified."""
        try:
            return tuple(
                JobObject(LauncherKind(manifest["kind"]), str(manifest["metadata"]["name"]))
                for manifest in _manifests(self.stored.data)
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return ()

    @property
    def rule(self) -> HandoverRule:
        """Return the rule that the job was decided by."""
        return rule_of(self.stored.data)

    @property
    def is_created(self) -> bool:
        """Return whether all objects of the job were created."""
        return bool(self.stored.annotations.get(JOBS_CREATED_ANNOTATION))

    @property
    def end(self) -> EndMark | None:
        return EndMark.parse(self.stored.annotations.get(JOB_END_ANNOTATION, ""))

    @property
    def held_since(self) -> datetime | None:
        return stored_time(self.stored.annotations.get(HELD_SINCE_ANNOTATION, ""))

    @property
    def held_before_seconds(self) -> float:
        """Return for how long the job held devices before they were last taken from it."""
        text = self.stored.annotations.get(HELD_BEFORE_ANNOTATION, "")
        return float(text) if text.isdecimal() else 0.0

    def held_seconds(self, now: datetime) -> float:
        """Return for how long the job has held devices, all times together."""
        present = (now - self.held_since).total_seconds() if self.held_since is not None else 0.0
        return self.held_before_seconds + max(present, 0.0)


def rule_of(data: Mapping[str, str]) -> HandoverRule:
    """Return the rule that the job of a record with this content was decided by."""
    try:
        owned = [bool(manifest["metadata"].get("ownerReferences")) for manifest in _manifests(data)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return HandoverRule.FREE
    return HandoverRule.OWNED if owned and all(owned) else HandoverRule.FREE


def _manifests(data: Mapping[str, str]) -> list[dict[str, Any]]:
    manifests: list[dict[str, Any]] = json.loads(data.get(MANIFESTS_KEY, ""))
    return manifests


def objects_to_read(snapshot: Snapshot) -> tuple[JobObject, ...]:
    """Return the objects of the winner's job that a decision needs: those of the plan's own, and those being created.

    A job of the user's is not looked at, except where the rule has changed since it was decided.
    """
    record, job = JobRecord.of(snapshot), snapshot.plan.status.job
    objects: dict[JobObject, None] = {}
    if record is not None:
        is_decided_anew = record.rule is not snapshot.rules.handover.rule and not record.is_created
        if record.rule is HandoverRule.OWNED or is_decided_anew:
            objects |= dict.fromkeys(record.objects)
    if job is not None and job.owned:  # somebody may have deleted or modified the record
        objects |= dict.fromkeys(JobObject(job.kind, name) for name in job.names)
    return tuple(objects)
