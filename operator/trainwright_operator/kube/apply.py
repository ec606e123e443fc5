"""Conversion of actions to idempotent requests to the API server, Kubernetes Events included."""

from __future__ import annotations

import logging
import secrets
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from trainwright.worker_api import SECRET_FILE
from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.api.installation import HandoverRule
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.actions import EmitEvent
from trainwright_operator.flow.config_map_data import ConfigMapData
from trainwright_operator.flow.gangs.child_metadata import MANAGED, child_labels, owner_reference
from trainwright_operator.flow.gangs.job_creation import NETWORK_POLICIES
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import HANDED_OVER_ANNOTATION, ROLE_LABEL
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.snapshot import DryRun, JobFacts, PlanFacts, RequestFailure, Snapshot, StoredConfigMap
from trainwright_operator.flow.winner_job.job_record import rule_of
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.client import JSON_PATCH, MERGE_PATCH, Api, ApiError
from trainwright_operator.kube.object_cache import ObjectCache, version_of
from trainwright_operator.kube.search_pool import SearchPool
from trainwright_operator.kube.snapshot_reader import ReadCache

COMPONENT: Final = "trainwright"
_MAX_MESSAGE = 1024
_MAX_PASSES_WITHOUT_REPORT = 3
"""Passes in a row that may leave status and Events to the next one."""


def event_manifest(plan: PlanFacts, event: EmitEvent, now: datetime) -> dict[str, Any]:
    """Return the Event as plain data."""
    time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{plan.name}-", "namespace": plan.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": plan.name,
            "namespace": plan.namespace,
            "uid": plan.uid,
        },
        "type": event.type.value,
        "reason": event.reason,
        "message": event.message[:_MAX_MESSAGE],
        "source": {"component": COMPONENT},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


logger = logging.getLogger(__name__)


class Applier:
    """Applier of one reconciliation's actions to the cluster. The cache learns what was written."""

    def __init__(self, api: Api, searches: SearchPool, cache: ObjectCache) -> None:
        self._api = api
        self._searches = searches
        self._cache = cache

    async def apply(self, snapshot: Snapshot, actions: Sequence[a.Action], memory: ReadCache) -> None:
        """Apply all actions in order, to no other objects than those of the snapshot.

        The next reconciliation follows at once if one of them changes something; then a few in a row leave status and
        Events to it. After a failure, apply only status and Events, so that users see the plan's progress.

        Raise the first ApiError at the end: the next reconciliation decides anew.
        """
        memory.wrote_status = False
        changes = [action for action in actions if changes_objects(action)]
        failure = await self._apply_until_failure(snapshot, changes, memory)
        if changes and failure is None and memory.passes_without_report < _MAX_PASSES_WITHOUT_REPORT:
            memory.passes_without_report += 1
        else:
            memory.passes_without_report = 0
            reports = [action for action in actions if not changes_objects(action)]
            unreported = await self._apply_until_failure(snapshot, reports, memory)
            failure = failure or unreported
        if failure is None:
            memory.failing = None
            return
        since = memory.failing.since if memory.failing is not None else datetime.now(UTC)
        memory.failing = RequestFailure(str(failure), since)
        raise failure

    async def _apply_until_failure(
        self, snapshot: Snapshot, actions: Iterable[a.Action], memory: ReadCache
    ) -> ApiError | None:
        """Apply actions up to the first that fails, and return its error. A deletion that fails keeps none from others."""
        failure = None
        for action in actions:
            try:
                await self._apply(snapshot, action, memory)
            except ApiError as error:
                if isinstance(action, a.SetStatus | a.AnnotateConfigMap) and error.is_conflict:
                    raise  # somebody changed the object meanwhile: the next reconciliation decides anew
                failure = failure or error
                if not isinstance(action, a.DeleteJob):
                    break
        return failure

    async def _apply(self, snapshot: Snapshot, action: a.Action, memory: ReadCache) -> None:  # noqa: C901, PLR0912 - a line an action
        plan, namespace = snapshot.plan, snapshot.plan.namespace
        match action:
            case a.CreateConfigMap():
                if action.role is a.StoredRole.TASK:
                    memory.refusals.clear()  # a new task is a new attempt
                body, path = config_map(plan, action), client.core_path("configmaps", namespace)
                if action.role is a.StoredRole.MEASUREMENT:
                    await self._keep(path, body)
                    self._cache.forget_measurements(namespace)
                    return
                made = await self._create(plan, path, body)
                self._cache.observe_stored(plan.uid, object_facts.stored_config_map(made))
            case a.AnnotateConfigMap(name=name, annotations=annotations):
                version = next((one.resource_version for one in snapshot.stored if one.name == name), "")
                seen = {"resourceVersion": version} if version else {}
                body = {"metadata": {"annotations": dict(annotations), **seen}}
                path = f"{client.core_path('configmaps', namespace)}/{name}"
                made = await self._api.patch(path, body, MERGE_PATCH)
                self._cache.observe_stored(plan.uid, object_facts.stored_config_map(made))
            case a.DeleteConfigMap(name=name):
                known = (*snapshot.stored, *snapshot.measurements)
                await self._delete(client.core_path("configmaps", namespace), name, known)
                self._cache.remove_stored(plan.uid, name)
                if any(one.name == name for one in snapshot.measurements):
                    self._cache.forget_measurements(namespace)
            case a.CreateNetworkPolicy(manifest=manifest):
                await self._isolate(plan, dict(manifest))
            case a.CreateJob(manifest=manifest):
                await self._create_job(plan, dict(manifest), memory)
            case a.HandOverJob(manifest=manifest):
                await self._hand_over(plan, dict(manifest))
            case a.DeleteJob(name=name):
                await self._delete_job(snapshot, name)
                self._cache.forget_children(plan.uid)  # the job, or pods of it, may stay for a while
            case a.PinPod(name=name, patch=patch):
                await self._pin(plan, name, patch, memory)
            case a.DryRunJob(key=key, manifest=manifest):
                memory.dry_run = await self._dry_run(namespace, key, dict(manifest))
            case a.StartPlanner(request=request):
                self._searches.start(plan.uid, request)
            case a.SetStatus(status=status):
                await self._set_status(plan, status)
                memory.wrote_status = True
            case a.EmitEvent():
                await self._emit(plan, action)
            case a.DeletePlan():
                await self._api.delete(client.plan_path(namespace, plan.name), uid=plan.uid)

    async def _delete(self, path: str, name: str, known: Iterable[JobFacts | StoredConfigMap]) -> None:
        await self._api.delete(f"{path}/{name}", uid=next((one.uid for one in known if one.name == name), ""))

    async def _delete_job(self, snapshot: Snapshot, name: str) -> None:
        known = (*snapshot.jobs, *(one.job for one in snapshot.handed_over))
        kind = next((job.launcher for job in known if job.name == name), LauncherKind.PYTORCH_JOB)
        await self._delete(client.jobs_path(LAUNCHERS[kind].api, snapshot.plan.namespace), name, known)

    async def _create(self, plan: PlanFacts, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create and return a child. An existing one is accepted if it is this plan's, possibly from before a restart."""
        try:
            made: dict[str, Any] = await self._api.create(path, body)
        except ApiError as error:
            if not error.is_conflict:
                raise
            made = await self._api.get(f"{path}/{body['metadata']['name']}")
            if plan.uid not in object_facts.owner_uids(made):
                raise ApiError(
                    409, f"{body['metadata']['name']} already exists with another owner; delete it"
                ) from error
        return made

    async def _hand_over(self, plan: PlanFacts, manifest: dict[str, Any]) -> None:
        """Create an object of the winner's job. An existing one that goes is none, and one of the user's is not the plan's own."""
        name, launcher = manifest["metadata"]["name"], LAUNCHERS[LauncherKind(manifest["kind"])]
        made = await self._create(plan, client.jobs_path(launcher.api, plan.namespace), manifest)
        if "deletionTimestamp" in made["metadata"]:
            raise ApiError(409, f"{name} is still being deleted")
        if "ownerReferences" in manifest["metadata"] and not object_facts.is_owned_by(made, plan.uid):
            raise ApiError(409, f"{name} already exists and belongs to no plan; delete it, or set apply: Never")

    async def _isolate(self, plan: PlanFacts, manifest: dict[str, Any]) -> None:
        """Create a gang's NetworkPolicy; its name is of one task only, so an existing one is from before a restart."""
        try:
            await self._api.create(client.jobs_path(NETWORK_POLICIES, plan.namespace), manifest)
        except ApiError as error:
            if not error.is_conflict and not error.is_refusal and not error.is_missing:
                raise
            if not error.is_conflict:
                await self._emit(
                    plan, EmitEvent(a.EventType.WARNING, *explain(Reason.NETWORK_POLICY_REFUSED, what=error))
                )

    async def _keep(self, path: str, body: dict[str, Any]) -> None:
        """Create a measurement's ConfigMap, in place of one of that name: the last measurement counts.

        The plan does not need it, so a refusal, by a quota for example, is only logged.
        """
        name = body["metadata"]["name"]
        try:
            await self._api.create(path, body)
        except ApiError as error:
            if error.is_refusal:
                logger.warning("the measurement %s is not kept: %s", name, error)
                return
            if not error.is_conflict:
                raise
            found = (await self._api.get(f"{path}/{name}"))["metadata"]
            if (found.get("labels") or {}).get(ROLE_LABEL) != a.StoredRole.MEASUREMENT:
                logger.warning("ConfigMap %s is not a kept measurement, so none is kept in its place", name)
                return
            await self._api.delete(f"{path}/{name}", uid=found.get("uid", ""))
            await self._api.create(path, body)

    async def _create_job(self, plan: PlanFacts, manifest: dict[str, Any], memory: ReadCache) -> None:
        name, launcher = manifest["metadata"]["name"], LAUNCHERS[LauncherKind(manifest["kind"])]
        try:
            made = await self._create(plan, client.jobs_path(launcher.api, plan.namespace), manifest)
            self._cache.observe_child(plan.uid, object_facts.job_facts(made, launcher), _version(made), deleted=False)
            memory.refusals.pop(name, None)
        except ApiError as error:
            if not error.is_refusal and not error.is_missing:
                raise
            memory.refusals[name] = str(error)

    async def _pin(self, plan: PlanFacts, name: str, patch: Sequence[Any], memory: ReadCache) -> None:
        path = f"{client.core_path('pods', plan.namespace)}/{name}"
        try:
            made = await self._api.patch(path, [dict(operation) for operation in patch], JSON_PATCH)
            self._cache.observe_child(plan.uid, object_facts.pod_facts(made), _version(made), deleted=False)
            memory.refusals.pop(name, None)
        except ApiError as error:
            # The pod or its gate is gone, as the next reconciliation sees, or a policy forbids the pin, as the refusal
            # reports.
            if not error.is_missing and not error.is_refusal:
                raise
            logger.warning("pod %s/%s was not assigned to its node: %s", plan.namespace, name, error)
            self._cache.forget_children(plan.uid)
            memory.refusals[name] = str(error)

    async def _dry_run(self, namespace: str, key: str, manifest: dict[str, Any]) -> DryRun:
        launcher = LAUNCHERS[LauncherKind(manifest["kind"])]
        path = client.jobs_path(launcher.api, namespace)
        try:
            await self._api.create(path, manifest, dryRun="All", fieldValidation="Strict")
        except ApiError as error:
            if error.is_missing:
                return DryRun(key, launcher.missing, str(error))
            if error.is_forbidden:  # not for the template to mend
                return DryRun(key, Reason.JOB_REFUSED, str(error))
            if error.is_refusal:
                return DryRun(key, Reason.POD_TEMPLATE_INVALID, str(error))
            raise
        return DryRun(key)

    async def _set_status(self, plan: PlanFacts, status: TrainingPlanStatus) -> None:
        """Write the whole status at once, unless the plan was changed or replaced since it was read."""
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": plan.uid},
            # Not a test, whose failure would be a 422: an older version than the stored one is a conflict.
            {"op": "add", "path": "/metadata/resourceVersion", "value": plan.resource_version},
            {"op": "add", "path": "/status", "value": status.dump()},
        ]
        made = await self._api.patch(f"{client.plan_path(plan.namespace, plan.name)}/status", patch, JSON_PATCH)
        written = TrainingPlanStatus.model_validate(made["status"])
        self._cache.store_plan(replace(plan, status=written, resource_version=made["metadata"]["resourceVersion"]))

    async def _emit(self, plan: PlanFacts, event: a.EmitEvent) -> None:
        """Create an Event. A failure is only logged: Events are informative."""
        try:
            await self._api.create(
                client.core_path("events", plan.namespace), event_manifest(plan, event, datetime.now(UTC))
            )
        except ApiError as error:
            logger.warning("cannot create an Event: %s", error)


def changes_objects(action: a.Action) -> bool:
    """Return whether an action is more than a report of the plan's progress."""
    return not isinstance(action, a.SetStatus | a.EmitEvent)


def _version(resource: dict[str, Any]) -> int:
    return version_of(resource["metadata"].get("resourceVersion", ""))


def config_map(plan: PlanFacts, action: a.CreateConfigMap) -> dict[str, Any]:
    """Return a ConfigMap as plain data: a task with a new secret of its gang's.

    One that is handed over to the user, or a measurement, is not the plan's: it stays where the plan is deleted.
    """
    stored = ConfigMapData.of(action)
    secret = {SECRET_FILE: secrets.token_hex()} if action.role is a.StoredRole.TASK else {}
    binary = {key: b64encode(content).decode() for key, content in stored.compressed.items()}
    labels = child_labels(plan, action.gang)
    owner: dict[str, Any] = {"ownerReferences": [owner_reference(plan)]}
    if action.role is a.StoredRole.HANDOVER:
        owner = (owner if rule_of(action.data) is HandoverRule.OWNED else {}) | {
            "annotations": {HANDED_OVER_ANNOTATION: plan.uid}
        }
    elif action.role is a.StoredRole.MEASUREMENT:
        labels, owner = {**MANAGED, **action.labels}, {"annotations": dict(action.annotations)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": action.name,
            "namespace": plan.namespace,
            "labels": labels | {ROLE_LABEL: action.role.value},
            **owner,
        },
        "data": {**stored.texts, **secret},
        **({"binaryData": binary} if binary else {}),
    }
