"""Doing what was decided: each action one idempotent request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from trainwright_operator import events
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.gang import labels, owner_reference
from trainwright_operator.flow.names import ROLE_LABEL
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import DryRun, PlanFacts, RequestFailure
from trainwright_operator.kube import paths
from trainwright_operator.kube.api import JSON_PATCH, MERGE_PATCH, Api, ApiError
from trainwright_operator.kube.observe import Memory
from trainwright_operator.kube.searches import Searches

logger = logging.getLogger(__name__)


class Applier:
    """Applies the actions of one pass to the cluster."""

    def __init__(self, api: Api, searches: Searches) -> None:
        self._api = api
        self._searches = searches

    async def apply(self, plan: PlanFacts, actions: Sequence[a.Action], memory: Memory) -> None:
        """All actions in order. After one that fails only the status is still written and told.

        So people see how far the plan is. Raises that ApiError at the end: the next pass decides anew.
        """
        failure: ApiError | None = None
        for action in actions:
            if failure is not None and not isinstance(action, a.SetStatus | a.EmitEvent):
                continue
            try:
                await self._apply(plan, action, memory)
            except ApiError as error:
                failure = failure or error
                if isinstance(action, a.SetStatus):
                    break  # what was not written is no news yet
        if failure is None:
            memory.failing = None
            return
        since = memory.failing.since if memory.failing is not None else datetime.now(UTC)
        memory.failing = RequestFailure(str(failure), since)
        raise failure

    async def _apply(self, plan: PlanFacts, action: a.Action, memory: Memory) -> None:  # noqa: C901 - a line an action
        namespace = plan.namespace
        match action:
            case a.CreateConfigMap():
                if action.role is a.StoredRole.ORDER:
                    memory.refusals.clear()  # a new order is a new attempt
                await self._create(plan, paths.core("configmaps", namespace), _config_map(plan, action))
            case a.AnnotateConfigMap(name=name, annotations=annotations):
                body = {"metadata": {"annotations": dict(annotations)}}
                await self._api.patch(f"{paths.core('configmaps', namespace)}/{name}", body, MERGE_PATCH)
            case a.DeleteConfigMap(name=name):
                await self._api.delete(f"{paths.core('configmaps', namespace)}/{name}")
            case a.CreateJob(manifest=manifest):
                await self._create_job(plan, dict(manifest), memory)
            case a.DeleteJob(name=name):
                await self._api.delete(f"{paths.jobs(namespace)}/{name}")
            case a.PinPod(name=name, patch=patch):
                await self._pin(namespace, name, patch, memory)
            case a.DryRunJob(key=key, manifest=manifest):
                memory.dry_run = await self._dry_run(namespace, key, dict(manifest))
            case a.StartPlanner(request=request):
                self._searches.start(plan.uid, request)
            case a.SetStatus(status=status):
                await self._set_status(plan, status.dump())
            case a.EmitEvent():
                await self._emit(plan, action)
            case a.DeletePlan():
                await self._api.delete(paths.plan(namespace, plan.name))

    async def _create(self, plan: PlanFacts, path: str, body: dict[str, Any]) -> None:
        """Create a child; one of that name is ours if this very plan owns it, also from before a restart."""
        try:
            await self._api.create(path, body)
        except ApiError as error:
            if not error.is_conflict:
                raise
            found = await self._api.get(f"{path}/{body['metadata']['name']}")
            owners = {owner["uid"] for owner in found["metadata"].get("ownerReferences") or []}
            if plan.uid not in owners:
                raise ApiError(
                    409, f"{body['metadata']['name']} exists already and belongs to somebody else"
                ) from error

    async def _create_job(self, plan: PlanFacts, manifest: dict[str, Any], memory: Memory) -> None:
        name = manifest["metadata"]["name"]
        try:
            await self._create(plan, paths.jobs(plan.namespace), manifest)
            memory.refusals.pop(name, None)
        except ApiError as error:
            if not error.is_refusal and not error.is_missing:
                raise
            memory.refusals[name] = str(error)

    async def _pin(self, namespace: str, name: str, patch: Sequence[Any], memory: Memory) -> None:
        path = f"{paths.core('pods', namespace)}/{name}"
        try:
            await self._api.patch(path, [dict(operation) for operation in patch], JSON_PATCH)
            memory.refusals.pop(name, None)
        except ApiError as error:
            # The pod went, or its gate did: the next pass sees which. Or somebody's policy forbids it, which that tells.
            if not error.is_missing and not error.is_refusal:
                raise
            logger.warning("pod %s/%s was not sent to its node: %s", namespace, name, error)
            memory.refusals[name] = str(error)

    async def _dry_run(self, namespace: str, key: str, manifest: dict[str, Any]) -> DryRun:
        try:
            await self._api.create(paths.jobs(namespace), manifest, dryRun="All", fieldValidation="Strict")
        except ApiError as error:
            if error.is_missing:
                return DryRun(key, Reason.PYTORCHJOB_MISSING, str(error))
            if error.is_refusal:
                return DryRun(key, Reason.POD_TEMPLATE_INVALID, str(error))
            raise
        return DryRun(key)

    async def _set_status(self, plan: PlanFacts, status: dict[str, Any]) -> None:
        """The whole status in one write; the test keeps it off another plan that was given the same name."""
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": plan.uid},
            {"op": "add", "path": "/status", "value": status},
        ]
        await self._api.patch(f"{paths.plan(plan.namespace, plan.name)}/status", patch, JSON_PATCH)

    async def _emit(self, plan: PlanFacts, event: a.EmitEvent) -> None:
        """Events are for people; a plan does not stop because one is lost."""
        try:
            await self._api.create(
                paths.core("events", plan.namespace), events.manifest(plan, event, datetime.now(UTC))
            )
        except ApiError as error:
            logger.warning("an Event was lost: %s", error)


def _config_map(plan: PlanFacts, action: a.CreateConfigMap) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": action.name,
            "namespace": plan.namespace,
            "labels": labels(plan, action.gang) | {ROLE_LABEL: action.role.value},
            "ownerReferences": [owner_reference(plan)],
        },
        "data": dict(action.data),
    }
