"""Launchers by kind, and which one a gang or a plan has."""

from __future__ import annotations

from typing import Final

from trainwright.worker_api import Gang
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.gang_network import NETWORK_KEY, parse_network
from trainwright_operator.flow.gangs.kueue import dump_labels, dump_named_nodes, parse_labels, parse_named_nodes
from trainwright_operator.flow.gangs.launchers.job_set import JobSetLauncher
from trainwright_operator.flow.gangs.launchers.launcher import JobLauncher, Launcher
from trainwright_operator.flow.gangs.launchers.local import LOCAL_GANG, LocalLauncher
from trainwright_operator.flow.gangs.launchers.pytorch_job import PyTorchJobLauncher
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import PlanFacts, Snapshot, StoredConfigMap

LAUNCHERS: Final[dict[LauncherKind, JobLauncher]] = {
    launcher.kind: launcher for launcher in (PyTorchJobLauncher(), JobSetLauncher())
}
"""Launchers of a cluster in the order in which a plan without a wish tries them."""
_LAUNCHER_KEY: Final = "launcher"
"""Key of a gang's launcher beside its task; absent for PyTorchJob, which former versions did not name."""
_LABELS_KEY: Final = "excluded-labels.json"
"""Key of the labels that the nodes of a gang in a queue do not have."""
_NAMED_KEY: Final = "named-nodes.json"
"""Key of the nodes that the pods of a gang in a queue name themselves."""


def possible_launchers(snapshot: Snapshot) -> tuple[Launcher, ...]:
    """Return the launchers that the plan may use, the best first."""
    return (LocalLauncher(),) if LOCAL_GANG in snapshot.launchers else job_launchers(snapshot.plan)


def job_launchers(plan: PlanFacts) -> tuple[JobLauncher, ...]:
    """Return those of a cluster that a plan may use: the one asked for, else the one chosen before, else any.

    In a queue a gang has to be one object, or Kueue would admit a part of it.
    """
    spec = plan.spec
    if spec is not None and spec.queue_name is not None:
        return (LAUNCHERS[LauncherKind.JOB_SET],)
    chosen = (spec.launcher if spec is not None else None) or plan.status.launcher
    return tuple(LAUNCHERS.values()) if chosen is None else (LAUNCHERS[chosen],)


def launcher_record(context: ReconcileContext, gang: Gang) -> dict[str, str]:
    """Return the entries of a new gang's task that tell its launcher, and what the queue makes of its nodes."""
    kind = possible_launchers(context.snapshot)[0].kind
    record = {} if kind == LauncherKind.PYTORCH_JOB else {_LAUNCHER_KEY: str(kind)}
    if context.spec.queue_name is not None:
        names = tuple(node.name for node in gang.nodes)
        record |= {_LABELS_KEY: dump_labels(context, names), _NAMED_KEY: dump_named_nodes(context, names)}
    return record


def launcher_of(task_map: StoredConfigMap | None) -> Launcher:
    """Return the launcher of a gang that has a task, whatever the plan asks for now."""
    recorded = task_map.data if task_map is not None else {}
    network = parse_network(recorded.get(NETWORK_KEY, ""))
    if _LABELS_KEY in recorded:
        return JobSetLauncher(
            excluded_labels=parse_labels(recorded[_LABELS_KEY]),
            named_nodes=parse_named_nodes(recorded.get(_NAMED_KEY, "")),
            network=network,
        )
    kind = recorded.get(_LAUNCHER_KEY, "")
    if kind == LOCAL_GANG:
        return LocalLauncher()
    return JobSetLauncher(network=network) if kind == LauncherKind.JOB_SET else PyTorchJobLauncher(network)


def definition_removed(kind: str, plan: PlanFacts) -> str:
    """Return what to do where the API server no longer serves a kind that the plan was accepted with."""
    others = [other for other in LAUNCHERS if other != kind]
    is_queued = plan.spec is not None and plan.spec.queue_name is not None
    other = "" if is_queued else f", or set launcher: {others[0]}"
    return f"the definition {kind} was removed: install it{other}"
