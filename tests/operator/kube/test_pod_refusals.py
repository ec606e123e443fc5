"""Words of Events about pods that are not created: read once for all plans of a namespace."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from flow_clock import run_jumping
from flow_requests import START, JumpingTime

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.snapshot import JobFacts
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.requests import pod_refusals
from trainwright_operator.kube.requests.pod_refusals import PodRefusals


class EventsApi:
    """API server that serves Events and counts how often it is asked for them."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)
        self.lists: list[str] = []
        self.is_down = False

    async def list(self, path: str, fieldSelector: str) -> list[dict[str, Any]]:  # noqa: N803 - the API server's word
        self.lists.append(f"{path} {fieldSelector}")
        if self.is_down:
            raise ApiError(403, "events is forbidden")
        return self.events


def event(name: str, message: str, at: datetime = START) -> dict[str, Any]:
    return {"involvedObject": {"name": name}, "message": message, "lastTimestamp": at.isoformat(), "metadata": {}}


def job(name: str, launcher: LauncherKind = LauncherKind.PYTORCH_JOB, at: datetime = START) -> JobFacts:
    return JobFacts(name, name, at, uid=name, launcher=launcher)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_refusals, "datetime", JumpingTime)


def test_all_plans_of_a_namespace_share_one_list_of_events() -> None:
    api = EventsApi(*(event(f"job-{number}", f"quota {number}") for number in range(100)))
    refusals = PodRefusals(cast("Api", api))

    async def story() -> None:
        await asyncio.sleep(16.0)
        for _ in range(3):
            told = await asyncio.gather(*(refusals.with_words("a", [job(f"job-{n}")], ()) for n in range(100)))
            assert [one.pods_refused for (one,) in told] == [f"quota {number}" for number in range(100)]
        assert len(api.lists) == 1
        await refusals.with_words("b", [job("job-1")], ())
        await asyncio.sleep(60.0)
        await refusals.with_words("a", [job("job-1")], ())
        assert [line.split("/")[4] for line in api.lists] == ["a", "b", "a"]

    run_jumping(story())


def test_young_jobs_and_refused_lists_have_no_words() -> None:
    api = EventsApi(event("job", "quota"))
    refusals = PodRefusals(cast("Api", api))

    async def story() -> None:
        await refusals.with_words("a", [job("job")], ())
        assert api.lists == []
        await asyncio.sleep(16.0)
        api.is_down = True
        assert (await refusals.with_words("a", [job("job")], ()))[0].pods_refused == ""
        api.is_down = False
        assert (await refusals.with_words("a", [job("job")], ()))[0].pods_refused == ""
        await asyncio.sleep(60.0)
        assert (await refusals.with_words("a", [job("job")], ()))[0].pods_refused == "quota"

    run_jumping(story())


def test_words_are_the_newest_about_the_job_itself_since_it_was_created() -> None:
    later = START + timedelta(seconds=5)
    api = EventsApi(
        event("set-s0-0", "old", START), event("set-s1-0", "new", later), event("set-another-s0-0", "other")
    )
    refusals = PodRefusals(cast("Api", api))

    async def story() -> None:
        await asyncio.sleep(60.0)
        (told,) = await refusals.with_words("a", [job("set", LauncherKind.JOB_SET)], ())
        assert told.pods_refused == "new"
        young = job("set", LauncherKind.JOB_SET, later + timedelta(seconds=1))
        assert (await refusals.with_words("a", [young], ()))[0].pods_refused == ""
        assert all("involvedObject.kind=Job" in line for line in api.lists)

    run_jumping(story())
