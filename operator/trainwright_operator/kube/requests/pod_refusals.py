"""Reader of why the pods of a gang's job are not created, which only Events tell: a quota, a LimitRange, Pod Security."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.snapshot import JobFacts, PodFacts
from trainwright_operator.kube import client
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.object_facts import parse_time
from trainwright_operator.kube.requests.back_off import BackOff

_PATIENCE_SECONDS: Final = 15.0
"""Age of a job up to which its launcher is still at work."""


class PodRefusals:
    """Words of Events of one plan's jobs, each read again after a while, which doubles."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    async def told(
        self, api: Api, namespace: str, jobs: Iterable[JobFacts], pods: Iterable[PodFacts], back_off: BackOff
    ) -> tuple[JobFacts, ...]:
        """Return the jobs, those without pods with what refuses them."""
        has_pods, known = {pod.job for pod in pods}, list(jobs)
        self._words = {job.uid: self._words[job.uid] for job in known if job.uid in self._words}
        return tuple([
            job if job.name in has_pods or not _is_late(job) else await self._with_words(api, namespace, job, back_off)
            for job in known
        ])  # fmt: skip

    async def _with_words(self, api: Api, namespace: str, job: JobFacts, back_off: BackOff) -> JobFacts:
        key = f"Events {job.uid}"
        if back_off.held(key) is None:
            try:
                events = await api.list(client.core_path("events", namespace), fieldSelector=_selector(job))
                self._words[job.uid] = _newest_words(job, events)
                back_off.refuse(key, ApiError(0, "read a while ago"))
            except ApiError as error:
                back_off.refuse(key, error)  # the words are only a help
        return replace(job, pods_refused=self._words.get(job.uid, ""))


def _is_late(job: JobFacts) -> bool:
    is_waiting = not (job.suspended or job.succeeded or job.terminating or job.failed_at is not None)
    since = max(job.created_at, job.resumed_at or job.created_at)
    return is_waiting and (datetime.now(UTC) - since).total_seconds() >= _PATIENCE_SECONDS


def _selector(job: JobFacts) -> str:
    """Return the selector of warnings about what creates the job's pods: itself, or the Jobs that JobSet makes of it."""
    if job.launcher is LauncherKind.JOB_SET:
        return "type=Warning,involvedObject.kind=Job"
    return f"type=Warning,involvedObject.name={job.name}"


def _newest_words(job: JobFacts, events: Iterable[dict[str, Any]]) -> str:
    """Return the message of the newest Event about the job since it was created, or an empty string."""
    own = [one for one in events if _is_about(job, one.get("involvedObject") or {}) and _time(one) >= job.created_at]
    return str(max(own, key=_time).get("message", "")) if own else ""


def _is_about(job: JobFacts, involved: dict[str, Any]) -> bool:
    name = str(involved.get("name", ""))
    return name == job.name or (job.launcher is LauncherKind.JOB_SET and name.startswith(f"{job.name}-s"))


def _time(event: dict[str, Any]) -> datetime:
    text = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return parse_time(text) if text else datetime.min.replace(tzinfo=UTC)
