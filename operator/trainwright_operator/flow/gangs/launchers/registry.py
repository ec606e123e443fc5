"""Launchers by kind, and which one a gang or a plan has."""

from __future__ import annotations

from typing import Final

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.launchers.job_set import JobSetLauncher
from trainwright_operator.flow.gangs.launchers.launcher import Launcher
from trainwright_operator.flow.gangs.launchers.pytorch_job import PyTorchJobLauncher
from trainwright_operator.flow.snapshot import PlanFacts, StoredConfigMap

LAUNCHERS: Final[dict[LauncherKind, Launcher]] = {one.kind: one for one in (PyTorchJobLauncher(), JobSetLauncher())}
"""Launchers in the order in which a plan without a wish tries them."""
_LAUNCHER_KEY: Final = "launcher"
"""Key of a gang's launcher beside its task; absent for PyTorchJob, which former versions did not name."""


def possible_launchers(plan: PlanFacts) -> tuple[Launcher, ...]:
    """Return the launchers that a plan may use, the best first: the one asked for, else the one chosen before, else any."""
    chosen = (plan.spec.launcher if plan.spec is not None else None) or plan.status.launcher
    return tuple(LAUNCHERS.values()) if chosen is None else (LAUNCHERS[chosen],)


def launcher_record(plan: PlanFacts) -> dict[str, str]:
    """Return the entry of a new gang's task that names the plan's launcher."""
    kind = possible_launchers(plan)[0].kind
    return {} if kind is LauncherKind.PYTORCH_JOB else {_LAUNCHER_KEY: kind.value}


def launcher_of(task_map: StoredConfigMap | None) -> Launcher:
    """Return the launcher of a gang that has a task, whatever the plan asks for now."""
    recorded = task_map.data.get(_LAUNCHER_KEY, "") if task_map is not None else ""
    is_known = recorded in LauncherKind.__members__.values()
    return LAUNCHERS[LauncherKind(recorded) if is_known else LauncherKind.PYTORCH_JOB]
