"""Application of a quarantine: reads no more of the plan's children than their names, since any of it may be the cause."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from trainwright_operator import plan_resource
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import PLAN_UID_LABEL, ROLE_LABEL
from trainwright_operator.flow.quarantine import quarantine
from trainwright_operator.flow.snapshot import PlanFacts, Snapshot
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.snapshot_reader import ReadCache

logger = logging.getLogger(__name__)

VERSION: Final = version("trainwright")
BREAKS_BEFORE_QUARANTINE: Final = 3
"""Broken reconciliations in a row before a plan is quarantined: one or two may come from a state that passes."""


async def isolate(api: Api, applier: Applier, key: tuple[str, str], error: BaseException) -> PlanFacts | None:
    """Quarantine a plan and return it, or None where it is gone. Raise ApiError if that fails."""
    try:
        resource = await api.get(client.plan_path(*key))
    except ApiError as missing:
        if missing.is_missing:
            return None
        raise
    try:
        plan = plan_resource.plan_facts(resource, "")
    except Exception:
        logger.exception("plan %s/%s: cannot be read", *key)
        plan = object_facts.bare_plan_facts(resource)
    selector = f"{PLAN_UID_LABEL}={plan.uid}"
    maps = client.core_path("configmaps", plan.namespace)
    await _delete_all(api, maps, f"{selector},{ROLE_LABEL}={StoredRole.TASK}")
    for launcher in LAUNCHERS.values():
        await _delete_all(api, client.jobs_path(launcher.api, plan.namespace), selector)
    actions = quarantine(plan, error, VERSION, datetime.now(UTC))
    (await applier.apply(Snapshot(plan), actions, ReadCache())).check()
    return plan


async def _delete_all(api: Api, path: str, selector: str) -> None:
    try:
        items = await api.list(path, labelSelector=selector)
    except ApiError as error:
        if error.is_missing:
            return  # this cluster lacks the launcher
        raise
    for item in filter(object_facts.is_of_plan, items):
        await api.delete(f"{path}/{item['metadata']['name']}", uid=item["metadata"].get("uid", ""))
