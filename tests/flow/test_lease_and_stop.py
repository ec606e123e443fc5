"""Nothing is done without the lease: neither when waiting for it fails, nor while it is released."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from trainwright_operator.kube import lease as lease_module
from trainwright_operator.kube import main
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings


class Ended(BaseException):
    """Stand-in for the process's exit."""


class Slow:
    """Slow API server that counts requests."""

    def __init__(self) -> None:
        self.asked = 0

    def with_own_thread(self, name: str) -> Slow:
        return self

    async def get(self, path: str, **query: str) -> Any:
        self.asked += 1
        await asyncio.sleep(60)


def test_operator_exits_when_acquiring_the_lease_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def acquire(lease: Lease) -> None:
        raise KeyError("spec")

    def leave(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(Lease, "acquire", acquire)
    monkeypatch.setattr(main, "connect", Slow)
    monkeypatch.setattr(main, "start_http_server", lambda port, registry: None)
    monkeypatch.setattr(main.health, "serve", lambda port, pulse: None)
    monkeypatch.setattr(main.os, "_exit", leave)
    monkeypatch.setattr(main, "Reconciler", lambda *_: pytest.fail("it works without the lease"))
    with pytest.raises(Ended, match="70"):
        asyncio.run(main._run(Settings()))


def test_stopped_reconciler_starts_no_reconciliation() -> None:
    async def story() -> tuple[int, int]:
        api = Slow()
        reconciler = Reconciler(cast(Api, api), Settings(), Metrics(CollectorRegistry()), Liveness())
        reconciler.wake("default", "demo")
        await asyncio.sleep(0.05)
        before = api.asked
        reconciler.wake("default", "demo")  # a plan's end would start a new pass
        await reconciler.stop()
        reconciler.wake("default", "other")
        await asyncio.sleep(0.05)
        return before, api.asked

    assert asyncio.run(story()) == (1, 1)


def test_operator_is_healthy_while_waiting_for_its_lease_without_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(Slow):
        async def get(self, path: str, **query: str) -> Any:
            raise ApiError(0, "connection refused")

    class Counting(Liveness):
        beats = 0

        def record_success(self) -> None:
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
