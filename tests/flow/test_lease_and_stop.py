"""Without the lease nothing is done: not when waiting for it breaks down, and not while it is handed back."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from trainwright_operator.kube import lease as lease_module
from trainwright_operator.kube import run
from trainwright_operator.kube.api import Api, ApiError
from trainwright_operator.kube.health import Pulse
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings


class Ended(BaseException):
    """In place of the process's end."""


class Slow:
    """An API server that takes its time; it counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def apart(self, name: str) -> Slow:
        return self

    async def get(self, path: str, **query: str) -> Any:
        self.asked += 1
        await asyncio.sleep(60)


def test_an_operator_whose_wait_for_the_lease_breaks_down_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def acquire(lease: Lease) -> None:
        raise KeyError("spec")

    def leave(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(Lease, "acquire", acquire)
    monkeypatch.setattr(run, "connect", Slow)
    monkeypatch.setattr(run, "start_http_server", lambda port, registry: None)
    monkeypatch.setattr(run.health, "serve", lambda port, pulse: None)
    monkeypatch.setattr(run.os, "_exit", leave)
    monkeypatch.setattr(run, "Reconciler", lambda *_: pytest.fail("it works without the lease"))
    with pytest.raises(Ended, match="70"):
        asyncio.run(run._run(Settings()))


def test_nothing_begins_a_pass_once_the_reconciler_stops() -> None:
    async def story() -> tuple[int, int]:
        api = Slow()
        reconciler = Reconciler(cast(Api, api), Settings(), Metrics(CollectorRegistry()), Pulse())
        reconciler.wake("default", "demo")
        await asyncio.sleep(0.05)
        before = api.asked
        reconciler.wake("default", "demo")  # what a plan's end turns into a new begin
        await reconciler.stop()
        reconciler.wake("default", "other")
        await asyncio.sleep(0.05)
        return before, api.asked

    assert asyncio.run(story()) == (1, 1)


def test_an_operator_that_waits_for_its_lease_is_healthy_though_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(Slow):
        async def get(self, path: str, **query: str) -> Any:
            raise ApiError(0, "connection refused")

    class Counting(Pulse):
        beats = 0

        def beat(self) -> None:
            self.beats += 1

    monkeypatch.setattr(lease_module, "RETRY_SECONDS", 0.01)
    pulse = Counting()

    async def story() -> None:
        waiting = asyncio.create_task(Lease(cast(Api, Dead()), Settings(), pulse).acquire())
        while pulse.beats < 3:
            assert not waiting.done()
            await asyncio.sleep(0.01)
        waiting.cancel()

    asyncio.run(asyncio.wait_for(story(), 15))
