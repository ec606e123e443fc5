"""Reader of why the pods of a gang's job are not created, which only Events tell: a quota, a LimitRange, Pod Security."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from trainwright.outside.plain_text import plain_line
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.snapshot import JobFacts, PodFacts
from trainwright_operator.kube import client
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.plan_resource import parse_time

_PATIENCE_SECONDS: Final = 15.0
"""Age of a job up to which its launcher is still at work."""
_SHARED_SECONDS: Final = 20.0
"""Age of a reading that serves all plans of a namespace. The API server reads every Event of it from its store for each
list, whatever the selector, so that a list for each of 1,000 plans would cost it more than all that they create."""
_DURATION_FACTOR: Final = 10.0
"""Least age as a multiple of the reading's duration, which bounds the API server's load."""
_OWNER_KINDS: Final = {LauncherKind.JOB_SET: "Job"}
"""Kind whose Events say so, where it is not the launcher's own: a JobSet makes Jobs."""


class _Warning(NamedTuple):
    """Newest Event about one owner of pods."""

    at: datetime
    message: str


class _Reading(NamedTuple):
    expires_at: float
    warnings: dict[str, _Warning]
    """By the name of the job: a JobSet's Jobs are named after it, with `-s` and a number each."""


class PodRefusals:
    """Warnings about what creates pods, by namespace and kind."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._readings: dict[tuple[str, LauncherKind], _Reading] = {}
        self._locks: dict[tuple[str, LauncherKind], asyncio.Lock] = {}

    async def with_words(
        self, namespace: str, jobs: Iterable[JobFacts], pods: Iterable[PodFacts]
    ) -> tuple[JobFacts, ...]:
        """Return the jobs, those that have had no pods for a while with what refuses them."""
        has_pods = {pod.job for pod in pods}
        return tuple([
            job if job.name in has_pods or not _is_late(job) else await self._with_words(namespace, job) for job in jobs
        ])  # fmt: skip

    async def _with_words(self, namespace: str, job: JobFacts) -> JobFacts:
        warning = (await self._warnings(namespace, job.launcher)).get(job.name)
        is_own = warning is not None and warning.at >= job.created_at
        return replace(job, pods_refused=warning.message if warning is not None and is_own else "")

    async def _warnings(self, namespace: str, launcher: LauncherKind) -> dict[str, _Warning]:
        key = namespace, launcher
        async with self._locks.setdefault(key, asyncio.Lock()):
            began, reading = _now(), self._readings.get(key)
            if reading is not None and began < reading.expires_at:
                return reading.warnings
            selector = f"type=Warning,involvedObject.kind={_OWNER_KINDS.get(launcher, launcher.value)}"
            try:
                events = await self._api.list(client.core_path("events", namespace), fieldSelector=selector)
                warnings = newest_warnings(events, launcher)
            except ApiError:
                warnings = reading.warnings if reading is not None else {}  # they are only a help
            now = _now()
            self._readings[key] = _Reading(now + max(_SHARED_SECONDS, _DURATION_FACTOR * (now - began)), warnings)
            return warnings


def _is_late(job: JobFacts) -> bool:
    is_waiting = not (job.suspended or job.succeeded or job.terminating or job.failed_at is not None)
    since = max(job.created_at, job.resumed_at or job.created_at)
    return is_waiting and (datetime.now(UTC) - since).total_seconds() >= _PATIENCE_SECONDS


def newest_warnings(events: Iterable[dict[str, Any]], launcher: LauncherKind) -> dict[str, _Warning]:
    """Return the newest warning about each job."""
    newest: dict[str, _Warning] = {}
    for event in events:
        name = str((event.get("involvedObject") or {}).get("name", ""))
        if launcher is LauncherKind.JOB_SET:
            name = name.rpartition("-s")[0]
        warning = _Warning(_time(event), plain_line(str(event.get("message", ""))))
        if name and (name not in newest or warning.at >= newest[name].at):
            newest[name] = warning
    return newest


def _time(event: dict[str, Any]) -> datetime:
    text = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return parse_time(text) if text else datetime.min.replace(tzinfo=UTC)


def _now() -> float:
    return asyncio.get_running_loop().time()
