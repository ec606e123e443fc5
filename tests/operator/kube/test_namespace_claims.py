"""Claims of namespaces: of two releases that watch the same one, only one works there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from flow_api import MemoryApi

from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.namespace_claims import DURATION_SECONDS, NamespaceClaims
from trainwright_operator.settings import Settings

PATH = "/apis/coordination.k8s.io/v1/namespaces/team/leases/trainwright-plans"
FIRST, SECOND = "one-system/trainwright", "two-system/trainwright"


class Leases(MemoryApi):
    """API server that refuses to create twice, and to replace what was written since it was read."""

    version = requests = 0

    async def get(self, path: str, **query: str) -> Any:
        self.requests += 1
        return await super().get(path, **query)

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        if f"{path}/{body['metadata']['name']}" in self.objects:
            raise ApiError(409, "exists")
        return await super().create(path, self._next(body), **query)

    async def replace(self, path: str, body: dict[str, Any]) -> Any:
        if body["metadata"]["resourceVersion"] != self._find(path)["metadata"]["resourceVersion"]:
            raise ApiError(409, "conflict")
        return await super().replace(path, self._next(body))

    def _next(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        return body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}


class Releases:
    """Two releases with one API server and one clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.api = Leases({})
        self.first, self.second = (self.start(name) for name in (FIRST, SECOND))

    def start(self, release: str) -> NamespaceClaims:
        namespace, name = release.split("/")
        settings = Settings(lease_namespace=namespace, lease_name=name)
        return NamespaceClaims(cast(Api, self.api), settings, clock=lambda: self.now)

    @property
    def holder(self) -> str:
        return str(self.api.objects[PATH]["spec"]["holderIdentity"])


def run(story: Callable[[Releases], Awaitable[None]]) -> None:
    asyncio.run(cast(Any, story(Releases())))


def test_holder_is_named_without_control_characters() -> None:
    async def story(world: Releases) -> None:
        await world.first.other_holder("team")
        world.api.objects[PATH]["spec"]["holderIdentity"] = "their\x1b[2J release\n"
        assert await world.second.other_holder("team") == "their release"

    run(story)


def test_second_release_names_the_holder_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: Releases) -> None:
        assert await world.first.other_holder("team") == ""
        writes = len(world.api.writes)
        with caplog.at_level(logging.WARNING):
            for _ in range(50):
                assert await world.second.other_holder("team") == FIRST
                assert await world.first.other_holder("team") == ""
                world.now += 30
        assert all("leases/trainwright-plans" in path for _, path in world.api.writes[writes:])
        assert world.holder == FIRST

    run(story)
    (sentence,) = (record.getMessage() for record in caplog.records)
    assert sentence.startswith(f"namespace team: release {FIRST} works on its plans, so this one does nothing there")


def test_only_one_of_two_that_start_together_gets_the_namespace() -> None:
    async def story(world: Releases) -> None:
        found = await asyncio.gather(world.first.other_holder("team"), world.second.other_holder("team"))
        assert sorted(map(bool, found)) == [False, True]

    run(story)


def test_many_plans_of_a_namespace_claim_it_once() -> None:
    async def story(world: Releases) -> None:
        await asyncio.gather(*(world.first.other_holder("team") for _ in range(100)))
        assert len(world.api.writes) == 1

    run(story)


def test_claim_of_a_release_that_is_gone_is_taken_over_and_never_held_by_both() -> None:
    async def story(world: Releases) -> None:
        await world.first.other_holder("team")
        gone_at, taken_at = world.now, 0.0
        for _ in range(DURATION_SECONDS // 10 + 20):
            world.now += 10
            if not await world.second.other_holder("team"):
                taken_at = taken_at or world.now
        assert DURATION_SECONDS <= taken_at - gone_at <= DURATION_SECONDS + 120
        assert await world.first.other_holder("team") == SECOND

    run(story)


def test_restarted_operator_of_the_release_goes_on_at_once() -> None:
    async def story(world: Releases) -> None:
        await world.first.other_holder("team")
        assert await world.start(FIRST).other_holder("team") == ""

    run(story)


def test_claim_that_cannot_be_renewed_is_given_up_before_another_release_takes_it() -> None:
    async def story(world: Releases) -> None:
        await world.first.other_holder("team")
        world.api.refused = 503
        world.now += 0.6 * DURATION_SECONDS
        assert await world.first.other_holder("team") == ""
        world.now += 0.2 * DURATION_SECONDS
        with pytest.raises(ApiError):
            await world.first.other_holder("team")

    run(story)


def test_refused_claim_is_asked_for_once_for_all_plans_of_the_namespace() -> None:
    async def story(world: Releases) -> None:
        world.api.refused = 403
        for _ in range(20):
            with pytest.raises(ApiError, match="refused by the test"):
                await world.first.other_holder("team")
        assert world.api.requests == 1
        world.api.refused = 0
        world.now += 30
        assert await world.first.other_holder("team") == ""

    run(story)


@pytest.mark.parametrize("outage", [400, 4000])
def test_claim_outlives_an_outage_of_the_api_server(outage: int) -> None:
    async def story(world: Releases) -> None:
        await world.first.other_holder("team")
        for _ in range(5):
            world.now += 60
            assert await world.second.other_holder("team") == FIRST
        world.api.refused = 503
        for _ in range(outage // 60):
            world.now += 60
            with pytest.raises(ApiError):
                await world.second.other_holder("team")
        world.api.refused = 0
        world.now += 300
        assert await world.second.other_holder("team") == FIRST
        assert await world.first.other_holder("team") == ""

    run(story)
