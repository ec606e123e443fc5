"""Jobs that a plan owned and that outlived it: whoever deletes a plan may orphan what it owns, and its devices with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from trainwright_operator.flow.gangs.launchers.launcher import JobApi
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import (
    HANDED_OVER_ANNOTATION,
    HANDED_OVER_LABEL,
    OWNED_ANNOTATION,
    is_handover_name,
)
from trainwright_operator.kube import client
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.namespace_claims import NamespaceClaims

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 300.0
"""Interval of looks for such jobs: two lists of few objects in each watched namespace, or of all."""


class _Job(NamedTuple):
    api: JobApi
    namespace: str
    name: str
    uid: str
    plan_uid: str


class OrphanedJobs:
    """Jobs of plans' own that were found, to be deleted unless their plan is listed afterwards.

    They are listed before the plans, so that the plan of each job that is new is among these.
    """

    def __init__(self, api: Api, claims: NamespaceClaims, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._claims = claims
        self._clock = clock
        self._due: dict[str, float] = {}
        self._started = clock()

    async def find(self, namespace: str) -> tuple[_Job, ...]:
        """Return the jobs of plans' own in a namespace, or in all, if it is time to look."""
        if self._clock() < self._due.get(namespace, self._started + SWEEP_SECONDS):
            return ()
        self._due[namespace] = self._clock() + SWEEP_SECONDS
        apis = [launcher.api for launcher in LAUNCHERS.values()]
        pages = await asyncio.gather(*(self._list(api, namespace) for api in apis))
        return tuple(job for jobs in pages for job in jobs)

    async def _list(self, api: JobApi, namespace: str) -> list[_Job]:
        try:
            items = await self._api.list(client.jobs_path(api, namespace), labelSelector=HANDED_OVER_LABEL)
        except ApiError as error:
            logger.debug("listing %s of %s failed: %s", api.plural, namespace or "all namespaces", error)
            return []  # the cluster lacks the kind, or the next look finds them
        metas = (item["metadata"] for item in items)
        owned = (_job(api, meta) for meta in metas if OWNED_ANNOTATION in (meta.get("annotations") or {}))
        return [job for job in owned if is_handover_name(job.name, job.plan_uid)]  # a user's copy is the user's

    async def delete(self, jobs: Collection[_Job], plan_uids: Collection[str]) -> None:
        """Delete the jobs whose plan is not among those listed, where this release works."""
        for job in jobs:
            if job.plan_uid in plan_uids:
                continue
            try:
                if await self._claims.other_holder(job.namespace):
                    continue
                await self._api.delete(f"{client.jobs_path(job.api, job.namespace)}/{job.name}", uid=job.uid)
                logger.warning("%s/%s: deleted, as the plan that owned it is gone", job.namespace, job.name)
            except ApiError as error:
                logger.warning("%s/%s of a plan that is gone cannot be deleted: %s", job.namespace, job.name, error)


def _job(api: JobApi, meta: dict[str, Any]) -> _Job:
    annotations = meta.get("annotations") or {}
    return _Job(api, meta["namespace"], meta["name"], meta["uid"], annotations.get(HANDED_OVER_ANNOTATION, ""))
