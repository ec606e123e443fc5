"""Actions on this machine, each idempotent as in a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from trainwright.documents import loads
from trainwright.worker_api import WorkerTask
from trainwright_operator.flow import actions
from trainwright_operator.flow.actions import Action, EmitEvent, StoredRole
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.names import TASK_SUFFIX
from trainwright_operator.flow.snapshot import DryRun, StoredConfigMap
from trainwright_operator.local.gang_process import GangProcess
from trainwright_operator.local.tuned_plan import TunedPlan

_UID_BYTES = 4


class Applier:
    """Applies the actions of one plan.

    Args:
        take_machine: makes this plan the only one that measures here; returns whether it is.
        on_event: shows an Event.
    """

    def __init__(
        self, plan: TunedPlan, take_machine: Callable[[], bool], on_event: Callable[[EmitEvent], None]
    ) -> None:
        self._plan, self._take_machine, self._on_event = plan, take_machine, on_event

    def apply(self, action: Action, now: datetime) -> None:  # noqa: C901, PLR0912 - one case for each action
        """Apply one action."""
        plan = self._plan
        match action:
            case actions.CreateConfigMap():
                self._create_map(action, now)
            case actions.AnnotateConfigMap():
                stored = plan.maps.find(action.name)
                if stored is not None:
                    plan.maps.write(replace(stored, annotations={**stored.annotations, **action.annotations}))
            case actions.DeleteConfigMap():
                plan.maps.delete(action.name)
                plan.kept.delete(action.name)
            case actions.CreateJob():
                name = action.manifest["metadata"]["name"]
                if name not in plan.gangs:
                    plan.gangs[name] = GangProcess(action.manifest, plan.folder / "gangs" / name, now)
            case actions.PinPod():
                self._pin(action, now)
            case actions.DeleteJob():
                gang = plan.gangs.pop(action.name, None)
                if gang is not None:
                    gang.stop()
            case actions.DryRunJob():
                plan.dry_run = DryRun(action.key)  # what would be refused was refused before the first pass
            case actions.StartPlanner():
                if self._take_machine():
                    plan.search.start(action.request)
            case actions.SetStatus():
                plan.set_status(action.status)
            case EmitEvent():
                self._on_event(action)
            case actions.CreateNetworkPolicy() | actions.DeletePlan() | actions.HandOverJob() | actions.DrawPage():
                pass  # the gangs' sockets are this machine's own; the answer stays; the winner is written as files

    def _create_map(self, action: actions.CreateConfigMap, now: datetime) -> None:
        is_kept = action.role is StoredRole.MEASUREMENT
        store = self._plan.kept if is_kept else self._plan.maps
        if is_kept or store.find(action.name) is None:
            uid = os.urandom(_UID_BYTES).hex()
            annotations = dict(action.annotations)
            store.write(
                StoredConfigMap(action.name, action.gang, action.role, now, dict(action.data), annotations, uid=uid)
            )

    def _pin(self, action: actions.PinPod, now: datetime) -> None:
        """Assign a pod to its node; the gang of the last one starts, if no other plan measures here."""
        plan = self._plan
        gang = next((gang for gang in plan.gangs.values() if any(pod.name == action.name for pod in gang.pods)), None)
        if gang is None or gang.has_started or (plan.running and gang not in plan.running) or not self._take_machine():
            return
        if gang.pin(action.name, action.node):
            stored = plan.maps.find(f"{gang.name}{TASK_SUFFIX}")
            assert stored is not None
            text = stored.data[TASK_FILE]
            task: WorkerTask = loads(text, WorkerTask, source=stored.name)
            gang.start(text, plan.machine.device_map(task.gang.nodes), plan.image, now)
