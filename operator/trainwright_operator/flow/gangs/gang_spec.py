"""Gang that a phase requests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from trainwright.worker_api import WorkerTask
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.gangs import pod_template
from trainwright_operator.flow.snapshot import StoredConfigMap


@dataclass(frozen=True, slots=True)
class GangSpec:
    """Gang that a phase requests.

    Attributes:
        pending_seconds: limit on the pods' creation, and from their assignment to nodes to the start of the last one.
        run_seconds: limit on the run, from the start of the last pod.
        part_names: of a series, the result name of each trial, including the gang's own.
    """

    name: str
    task: WorkerTask
    pending_seconds: float
    run_seconds: float
    part_names: tuple[str, ...] = ()

    @property
    def result_names(self) -> tuple[str, ...]:
        """Return the names of the gang's stored results."""
        return self.part_names or (self.name,)


def find_series_gangs(stored: Iterable[StoredConfigMap]) -> frozenset[str]:
    """Return the gangs whose stored task is a readable series."""
    tasks = (one for one in stored if one.role == StoredRole.TASK)
    return frozenset(one.gang for one in tasks if _kind(one.data.get(pod_template.TASK_FILE, "")) == "series")


def _kind(task: str) -> object:
    try:
        document = json.loads(task)
    except (ValueError, RecursionError):
        return None
    return document.get("kind") if isinstance(document, dict) else None
