"""Gang that a phase requests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from trainwright.documents import DocumentError
from trainwright.exports import ExportFile
from trainwright.worker_api import LinkTask, ProfilingTask, WorkerTask
from trainwright_operator.api.frameworks import FrameworkSpec
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion
from trainwright_operator.flow.gangs import pod_template
from trainwright_operator.flow.snapshot import StoredConfigMap

_FRAMEWORK_KEY: Final = "framework.json"


@dataclass(frozen=True, slots=True)
class GangSpec:
    """Gang that a phase requests.

    Attributes:
        pending_seconds: limit on the pods' creation, and from their assignment to nodes to the start of the last one.
        run_seconds: limit on the run, from the start of the last pod.
        part_names: of a series, the result name of each trial, including the gang's own.
        framework: job of the user's that the pods run instead of our worker, if any.
        files: what it finds beside the task.
    """

    name: str
    task: WorkerTask
    pending_seconds: float
    run_seconds: float
    part_names: tuple[str, ...] = ()
    framework: FrameworkSpec | None = None
    files: tuple[ExportFile, ...] = ()

    @property
    def deadline_field(self) -> str:
        """Return the field of the spec that limits its run."""
        if isinstance(self.task, LinkTask):
            return "links.deadlineSeconds"
        return "profiling.deadlineSeconds" if isinstance(self.task, ProfilingTask) else "trials.runDeadlineSeconds"

    @property
    def result_names(self) -> tuple[str, ...]:
        """Return the names of the gang's stored results."""
        return self.part_names or (self.name,)

    @property
    def stored_framework(self) -> dict[str, str]:
        """Return the entries beside the task that `framework_of` reads and the pods mount."""
        if self.framework is None:
            return {}
        text = self.framework.model_dump_json(by_alias=True, exclude_defaults=True)
        return {file.name: file.text for file in self.files} | {_FRAMEWORK_KEY: text}


def framework_of(task_map: StoredConfigMap | None) -> FrameworkSpec | None:
    """Return the user's job that a gang with a task runs, whatever the spec asks for now.

    Raise NeedsNewerVersion for one with fields that this version does not know, DocumentError for one that was modified.
    """
    text = task_map.data.get(_FRAMEWORK_KEY) if task_map is not None else None
    try:
        return FrameworkSpec.model_validate_json(text) if text is not None else None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        assert task_map is not None
        what = f"{task_map.name}: {_FRAMEWORK_KEY}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        if first["type"] == "extra_forbidden":
            raise NeedsNewerVersion(what) from None
        raise DocumentError(what) from None


def find_framework_gangs(stored: Iterable[StoredConfigMap]) -> frozenset[str]:
    """Return the gangs that run a job of the user's."""
    return frozenset(
        config_map.gang
        for config_map in stored
        if config_map.role == StoredRole.TASK and _FRAMEWORK_KEY in config_map.data
    )


def find_series_gangs(stored: Iterable[StoredConfigMap]) -> frozenset[str]:
    """Return the gangs whose stored task is a readable series."""
    tasks = (config_map for config_map in stored if config_map.role == StoredRole.TASK)
    return frozenset(task.gang for task in tasks if _kind(task.data.get(pod_template.TASK_FILE, "")) == "series")


def _kind(task: str) -> object:
    try:
        document = json.loads(task)
    except (ValueError, RecursionError):
        return None
    return document.get("kind") if isinstance(document, dict) else None
