"""Conversion of actions to idempotent requests to the API server, Kubernetes Events included."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.actions import EmitEvent
from trainwright_operator.flow.decide import is_finished
from trainwright_operator.flow.gangs.job_creation import NETWORK_POLICIES
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS, definition_removed
from trainwright_operator.flow.names import ROLE_LABEL
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.snapshot import DryRun, JobFacts, PlanFacts, RequestFailure, Snapshot, StoredConfigMap
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.client import JSON_PATCH, MERGE_PATCH, Api, ApiError
from trainwright_operator.kube.object_cache import ObjectCache, version_of
from trainwright_operator.kube.requests.back_off import PIN_KEY
from trainwright_operator.kube.requests.manifests import config_map, event_manifest
from trainwright_operator.kube.search_pool import SearchPool
from trainwright_operator.kube.snapshot_reader import ReadCache

_MAX_PASSES_WITHOUT_REPORT = 3
"""Passes in a row that may leave status and Events to the next one."""
_CONFLICTS = 3
"""Conflicts in a row over one object from which on the plan says so."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of an action, or of all actions of a pass.

    Attributes:
        has_changed: whether something was changed, or refused for the first time, so that the next pass follows at once.
        has_pinned: whether the API server was asked to pin a pod.
        failure: first refusal of a request that the plan needs.
    """

    has_changed: bool = False
    has_pinned: bool = False
    wrote_status: bool = False
    failure: ApiError | None = None

    def __or__(self, later: Effect) -> Effect:
        return Effect(
            self.has_changed or later.has_changed,
            self.has_pinned or later.has_pinned,
            self.wrote_status or later.wrote_status,
            self.failure or later.failure,
        )

    def check(self) -> None:
        """Raise the failure, if there is one: the next reconciliation decides anew."""
        if self.failure is not None:
            raise self.failure


class Applier:
    """Applier of one reconciliation's actions to the cluster. The cache learns what was written."""

    def __init__(self, api: Api, searches: SearchPool, cache: ObjectCache) -> None:
        self._api = api
        self._searches = searches
        self._cache = cache

    async def apply(self, snapshot: Snapshot, actions: Sequence[a.Action], memory: ReadCache) -> Effect:
        """Apply all actions in order, to no other objects than those of the snapshot.

        The next reconciliation follows at once if one of them changes something; then a few in a row leave status and
        Events to it, except an answer. After a failure, apply only status and Events, so that users see the plan's
        progress; after a conflict, nothing. What was refused is not sent again before its pause is over, and counts as
        refused until then.
        """
        new = next((action.status for action in actions if isinstance(action, a.SetStatus)), None)
        is_answer = new is not None and new.is_answered and not is_finished(snapshot)
        changes = [action for action in actions if changes_objects(action)]
        # An answer goes before deletions: without the gang that waited too long, the next decision would begin it anew.
        last = [action for action in changes if is_answer and isinstance(action, a.DeleteConfigMap | a.DeleteJob)]
        first = [action for action in changes if action not in last]
        effect = await self._apply_until_failure(snapshot, first, memory)
        is_early = effect.has_changed and effect.failure is None and not is_answer
        if is_early and memory.passes_without_report < _MAX_PASSES_WITHOUT_REPORT:
            memory.passes_without_report += 1
        elif not isinstance(effect.failure, _Conflict):
            reports = [action for action in actions if not changes_objects(action)]
            memory.passes_without_report = 0 if reports else memory.passes_without_report
            effect |= await self._apply_until_failure(snapshot, reports, memory)
        if effect.failure is None:
            effect |= await self._apply_until_failure(snapshot, last, memory)
        if effect.failure is None:
            memory.failing = None
        elif not isinstance(effect.failure, _Conflict):
            since = memory.failing.since if memory.failing is not None else datetime.now(UTC)
            memory.failing = RequestFailure(str(effect.failure), since)
        return effect

    async def _apply_until_failure(self, snapshot: Snapshot, actions: Iterable[a.Action], memory: ReadCache) -> Effect:
        """Apply actions up to the first that fails. The deletion of a job that fails keeps none from others."""
        effect = Effect()
        gang_of = {pod.name: pod.gang for pod in snapshot.pods}
        pins = memory.back_off.held_pins(gang_of)
        unpinned: set[str | None] = {gang_of[name] for name in pins}
        for action in actions:
            if isinstance(action, a.PinPod) and gang_of.get(action.name) in unpinned and action.name not in pins:
                continue  # all of a gang's pods or none: the others would only hold devices
            own = await self._apply(snapshot, action, memory)
            effect |= own
            if own.failure is not None and not isinstance(action, a.DeleteJob):
                break
            if isinstance(action, a.PinPod) and action.name in memory.refusals:
                unpinned.add(gang_of.get(action.name))
        return effect

    async def _apply(self, snapshot: Snapshot, action: a.Action, memory: ReadCache) -> Effect:
        """Apply an action, or leave it refused where its pause is not over."""
        key, back_off = _key(action), memory.back_off
        if key in memory.done:
            return Effect()
        error, has_changed = back_off.held(key), False
        failure: ApiError | None = None
        is_sent = error is None
        if is_sent:
            try:
                await self._send(snapshot, action, memory)
            except ApiError as refusal:
                error = refusal = _with_words(snapshot.plan, action, refusal)
                is_first = back_off.refuse(key, refusal) == 1
                self._forget(snapshot.plan, action, refusal, is_first=is_first)
                await self._tell(snapshot.plan, action, refusal)
                # The next reconciliation says so, or tries something else.
                has_changed = (is_first and changes_objects(action)) or isinstance(action, a.DryRunJob)
                if isinstance(action, a.DryRunJob):
                    memory.dry_run = dry_run_answer(action, refusal)
        if error is None:
            back_off.accept(key)
            has_changed = changes_objects(action) and not isinstance(action, a.CreateNetworkPolicy)
            if isinstance(action, a.CreateNetworkPolicy | a.HandOverJob):
                memory.done.add(key)  # no snapshot shows them
            elif isinstance(action, a.AnnotateConfigMap | a.DeleteJob):
                memory.done.clear()  # the step that they belong to is over
        elif (
            isinstance(action, a.SetStatus | a.AnnotateConfigMap)
            and error.is_conflict
            and back_off.times(key) < _CONFLICTS
        ):
            failure = _Conflict(error.status, str(error))
        elif not _is_done_without(action, error, memory):
            failure = error.with_traceback(None)
        has_pinned, wrote_status = is_sent and isinstance(action, a.PinPod), isinstance(action, a.SetStatus)
        return Effect(has_changed, has_pinned, wrote_status and error is None, failure)

    async def _send(self, snapshot: Snapshot, action: a.Action, memory: ReadCache) -> None:  # noqa: C901, PLR0912, PLR0915 - a line an action
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
                written = await self._create(plan, path, body, memory.back_off.last(_key(action)))
                memory.done.clear()
                self._cache.observe_stored(plan.uid, object_facts.stored_config_map(written))
                if action.role is a.StoredRole.PAGE:
                    self._searches.discard(plan.uid)
            case a.AnnotateConfigMap(name=name, annotations=annotations):
                version = next((stored.resource_version for stored in snapshot.stored if stored.name == name), "")
                seen = {"resourceVersion": version} if version else {}
                body = {"metadata": {"annotations": dict(annotations), **seen}}
                path = f"{client.core_path('configmaps', namespace)}/{name}"
                written = await self._api.patch(path, body, MERGE_PATCH)
                self._cache.observe_stored(plan.uid, object_facts.stored_config_map(written))
            case a.DeleteConfigMap(name=name):
                existing = (*snapshot.stored, *snapshot.measurements)
                is_deleted = await self._delete(client.core_path("configmaps", namespace), name, existing)
                self._cache.remove_stored(plan.uid, name)
                if any(measurement.name == name for measurement in snapshot.measurements):
                    self._cache.forget_measurements(namespace)
                _require(is_deleted, name)
            case a.CreateNetworkPolicy(manifest=manifest):
                # Its name is of one task only, so an existing one is from before a restart.
                with _accepting_existing():
                    await self._api.create(client.jobs_path(NETWORK_POLICIES, namespace), dict(manifest))
            case a.CreateJob(manifest=manifest):
                await self._create_job(plan, dict(manifest), memory)
            case a.HandOverJob(manifest=manifest):
                await self._hand_over(plan, dict(manifest))
            case a.DeleteJob(name=name):
                _require(await self._delete_job(snapshot, name), name)
                self._cache.forget_children(plan.uid)  # the job, or pods of it, may stay for a while
            case a.PinPod(name=name, patch=patch):
                await self._pin(plan, name, patch, memory)
            case a.DryRunJob(key=key, manifest=manifest):
                path = client.jobs_path(LAUNCHERS[LauncherKind(manifest["kind"])].api, namespace)
                await self._api.create(path, dict(manifest), dryRun="All", fieldValidation="Strict")
                memory.dry_run = DryRun(key)
            case a.StartPlanner(request=request) | a.DrawPage(request=request):
                self._searches.start(plan.uid, request)
            case a.SetStatus(status=status):
                await self._set_status(plan, status)
            case a.EmitEvent():
                event = event_manifest(plan, action, datetime.now(UTC))
                await self._api.create(client.core_path("events", namespace), event)
            case a.DeletePlan():
                _require(await self._api.delete(client.plan_path(namespace, plan.name), uid=plan.uid), plan.name)
                self._cache.forget_plan((namespace, plan.name))

    def _forget(self, plan: PlanFacts, action: a.Action, error: ApiError, *, is_first: bool) -> None:
        """Drop what a refusal says is outdated; at the first of a row all that it may be, as its outcome is unknown."""
        is_outdated = error.is_conflict or error.is_missing
        if isinstance(action, a.SetStatus) and (is_first or is_outdated):
            self._cache.forget_plan((plan.namespace, plan.name))
        elif isinstance(action, a.AnnotateConfigMap) and is_outdated:
            self._cache.drop_stored(plan.uid)
        elif is_first and not error.is_forbidden and changes_objects(action):
            self._cache.forget_children(plan.uid)
            self._cache.forget_plan((plan.namespace, plan.name))

    async def _tell(self, plan: PlanFacts, action: a.Action, error: ApiError) -> None:
        """Tell of a refusal that the plan's conditions do not."""
        match action:
            case a.CreateNetworkPolicy():
                explanation = explain(Reason.NETWORK_POLICY_REFUSED, what=error)
                with suppress(ApiError):
                    event = event_manifest(plan, EmitEvent(a.EventType.WARNING, *explanation), datetime.now(UTC))
                    await self._api.create(client.core_path("events", plan.namespace), event)
            case a.CreateConfigMap(name=name, role=a.StoredRole.MEASUREMENT):
                logger.warning("the measurement %s is not kept: %s", name, error)
            case a.CreateConfigMap(role=a.StoredRole.PAGE) if error.is_refusal:
                self._searches.refuse_page(plan.uid, f"it could not be stored: {error}")
            case a.PinPod(name=name):
                logger.warning("pod %s/%s was not assigned to its node: %s", plan.namespace, name, error)
            case a.EmitEvent():
                logger.warning("cannot create an Event: %s", error)

    async def _delete(self, path: str, name: str, existing: Iterable[JobFacts | StoredConfigMap]) -> bool:
        return await self._api.delete(
            f"{path}/{name}", uid=next((item.uid for item in existing if item.name == name), "")
        )

    async def _delete_job(self, snapshot: Snapshot, name: str) -> bool:
        existing = (*snapshot.jobs, *(job_object.job for job_object in snapshot.handed_over))
        kind = next((job.launcher for job in existing if job.name == name), LauncherKind.PYTORCH_JOB)
        return await self._delete(client.jobs_path(LAUNCHERS[kind].api, snapshot.plan.namespace), name, existing)

    async def _create(
        self, plan: PlanFacts, path: str, body: dict[str, Any], before: ApiError | None = None
    ) -> dict[str, Any]:
        """Create and return a child. An existing one is accepted if it is this plan's, possibly from before a restart.

        `before`: the last refusal. After a conflict another one says that the other owner's object is still there.
        """
        try:
            created: dict[str, Any] = await self._api.create(path, body)
        except ApiError as error:
            if not error.is_conflict:
                raise
            if before is not None and before.is_conflict:
                raise before from error
            created = await self._api.get(f"{path}/{body['metadata']['name']}")
            if plan.uid not in object_facts.owner_uids(created):
                raise ApiError(
                    409, f"{body['metadata']['name']} already exists with another owner; delete it"
                ) from error
        return created

    async def _hand_over(self, plan: PlanFacts, manifest: dict[str, Any]) -> None:
        """Create an object of the winner's job. An existing one that goes is none, and one of the user's is not the plan's own."""
        name, launcher = manifest["metadata"]["name"], LAUNCHERS[LauncherKind(manifest["kind"])]
        created = await self._create(plan, client.jobs_path(launcher.api, plan.namespace), manifest)
        if "deletionTimestamp" in created["metadata"]:
            raise ApiError(409, f"{name} is still being deleted")
        if "ownerReferences" in manifest["metadata"] and not object_facts.is_owned_by(created, plan.uid):
            raise ApiError(409, f"{name} already exists and belongs to no plan; delete it, or set apply: Never")

    async def _keep(self, path: str, body: dict[str, Any]) -> None:
        """Create a measurement's ConfigMap, in place of one of that name: the last measurement counts."""
        name = body["metadata"]["name"]
        try:
            await self._api.create(path, body)
        except ApiError as error:
            if not error.is_conflict:
                raise
            metadata = (await self._api.get(f"{path}/{name}"))["metadata"]
            if (metadata.get("labels") or {}).get(ROLE_LABEL) != a.StoredRole.MEASUREMENT:
                logger.warning("ConfigMap %s is not a kept measurement, so none is kept in its place", name)
                return
            await self._api.delete(f"{path}/{name}", uid=metadata.get("uid", ""))
            await self._api.create(path, body)

    async def _create_job(self, plan: PlanFacts, manifest: dict[str, Any], memory: ReadCache) -> None:
        name, launcher = manifest["metadata"]["name"], LAUNCHERS[LauncherKind(manifest["kind"])]
        created = await self._create(plan, client.jobs_path(launcher.api, plan.namespace), manifest)
        self._cache.observe_child(plan.uid, object_facts.job_facts(created, launcher), _version(created), deleted=False)
        memory.refusals.pop(name, None)

    async def _pin(self, plan: PlanFacts, name: str, patch: Sequence[Any], memory: ReadCache) -> None:
        path = f"{client.core_path('pods', plan.namespace)}/{name}"
        pinned = await self._api.patch(path, [dict(operation) for operation in patch], JSON_PATCH)
        self._cache.observe_child(plan.uid, object_facts.pod_facts(pinned), _version(pinned), deleted=False)
        memory.refusals.pop(name, None)

    async def _set_status(self, plan: PlanFacts, status: TrainingPlanStatus) -> None:
        """Write the whole status at once, unless the plan was changed or replaced since it was read."""
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": plan.uid},
            # Not a test, whose failure would be a 422: an older version than the stored one is a conflict.
            {"op": "add", "path": "/metadata/resourceVersion", "value": plan.resource_version},
            {"op": "add", "path": "/status", "value": status.dump()},
        ]
        answer = await self._api.patch(f"{client.plan_path(plan.namespace, plan.name)}/status", patch, JSON_PATCH)
        written = TrainingPlanStatus.model_validate(answer["status"])
        self._cache.store_plan(replace(plan, status=written, resource_version=answer["metadata"]["resourceVersion"]))


class _Conflict(ApiError):  # noqa: N818 - an answer, not a fault
    """Conflict with somebody who changed the object meanwhile: the next reconciliation decides anew."""


@contextmanager
def _accepting_existing() -> Iterator[None]:
    """Take the conflict of a creation for success."""
    try:
        yield
    except ApiError as error:
        if not error.is_conflict:
            raise


def _with_words(plan: PlanFacts, action: a.Action, error: ApiError) -> ApiError:
    """Return the refusal of a job in words that say what to do, where the API server only answers that a page is missing."""
    if not error.is_undefined or not isinstance(action, a.CreateJob | a.HandOverJob | a.DryRunJob):
        return error
    kind = LauncherKind(action.manifest["kind"])
    is_probe = isinstance(action, a.DryRunJob)
    return ApiError(404, f"the API server does not serve {kind}" if is_probe else definition_removed(kind, plan))


def _require(is_deleted: bool, name: str) -> None:
    """Raise a 404 where a deletion found nothing to delete, so that it is not repeated again and again."""
    if is_deleted is False:
        raise ApiError(404, f"{name} is gone, or is another one of that name: nothing was deleted")


def dry_run_answer(action: a.DryRunJob, error: ApiError) -> DryRun | None:
    """Return what a refused dry run says, or None where the API server gave no answer."""
    if error.is_missing:
        launcher = LAUNCHERS[LauncherKind(action.manifest["kind"])]
        return DryRun(action.key, launcher.missing, str(error))
    if not error.is_refusal:
        return None
    # What is forbidden is not for the template to mend.
    return DryRun(action.key, Reason.JOB_REFUSED if error.is_forbidden else Reason.POD_TEMPLATE_INVALID, str(error))


def _key(action: a.Action) -> str:
    """Return what identifies an action's request among those of the plan."""
    match action:
        case a.CreateNetworkPolicy() | a.CreateJob() | a.HandOverJob():
            return f"{type(action).__name__} {action.manifest['metadata']['name']}"
        case a.DryRunJob():
            return f"{type(action).__name__} {action.manifest['kind']}"
        case a.AnnotateConfigMap():
            return f"{type(action).__name__} {action.name} {' '.join(action.annotations)}"
        case a.SetStatus() | a.EmitEvent() | a.DeletePlan() | a.StartPlanner() | a.DrawPage():
            return type(action).__name__
        case a.PinPod():
            return f"{PIN_KEY} {action.name}"
    return f"{type(action).__name__} {action.name}"


def _is_done_without(action: a.Action, error: ApiError, memory: ReadCache) -> bool:
    """Return whether the plan goes on without an action that was refused, and note what its gangs are to know."""
    is_answer = error.is_refusal or error.is_missing
    match action:
        case a.CreateJob() if is_answer:
            memory.refusals[action.manifest["metadata"]["name"]] = str(error)
        case a.PinPod():
            # The pod or its gate is gone, as the next reconciliation sees, or a policy forbids the pin.
            memory.refusals[action.name] = str(error)
        case a.DryRunJob() | a.CreateNetworkPolicy():
            return is_answer
        case a.CreateConfigMap(role=a.StoredRole.MEASUREMENT | a.StoredRole.PAGE):
            return error.is_refusal
        case a.DeleteConfigMap() | a.DeleteJob() | a.DeletePlan():
            return error.is_missing
        case _:
            return isinstance(action, a.EmitEvent)  # informative
    return True


def changes_objects(action: a.Action) -> bool:
    """Return whether an action is more than a report of the plan's progress."""
    return not isinstance(action, a.SetStatus | a.EmitEvent)


def log_actions(plan: PlanFacts, actions: Sequence[a.Action]) -> None:
    """Log all but the status."""
    for action in actions:
        if isinstance(action, EmitEvent):
            logger.info("plan %s/%s: %s: %s", plan.namespace, plan.name, action.reason, action.message)
        elif not isinstance(action, a.SetStatus):
            name = getattr(action, "name", "")
            logger.info("plan %s/%s: %s %s", plan.namespace, plan.name, type(action).__name__, name)


def _version(resource: dict[str, Any]) -> int:
    return version_of(resource["metadata"].get("resourceVersion", ""))
