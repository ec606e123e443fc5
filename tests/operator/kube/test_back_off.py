"""Pauses between reconciliations that fail: they grow, and never beyond their ceiling, however many fail in a row."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from flow_api import MemoryApi
from flow_clock import run_jumping
from flow_harm import lose_jobs
from flow_world import World, spec_of
from prometheus_client import CollectorRegistry

from trainwright import documents
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import SetStatus, StoredRole
from trainwright_operator.flow.gangs.retries import ATTEMPT_KEY, LostAttempt
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.kube import reconciler
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

PLAN = "/apis/trainwright.dev/v1alpha1/namespaces/default/trainingplans/demo"
META = {
    "name": "demo",
    "namespace": "default",
    "uid": "uid-1",
    "generation": 1,
    "resourceVersion": "1",
    "creationTimestamp": "2026-01-01T00:00:00Z",
}
FAILURES = 2_100
CEILING_SECONDS = 40.0


class ReadOnlyApi(MemoryApi):
    """API server that refuses to store any status while it `is_down`."""

    is_down = True

    async def patch(self, path: str, body: Any, content_type: str) -> Any:
        if self.is_down:
            raise ApiError(500, "etcdserver: no leader")
        return await super().patch(path, body, content_type)


def refused(*_: Any) -> list[Any]:
    return [SetStatus(TrainingPlanStatus())]


def broken(*_: Any) -> list[Any]:
    raise KeyError("memory")


class Passes:
    """Reconciler of one plan, and the times of its passes by the loop's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decide: Callable[..., list[Any]]) -> None:
        self.api = ReadOnlyApi({PLAN: {"metadata": dict(META), "spec": spec_of().model_dump(by_alias=True)}})
        self.times: list[float] = []
        self._decide = decide
        monkeypatch.setattr(reconciler, "decide", self.decide)
        monkeypatch.setattr(reconciler, "requeue_after_seconds", lambda *_: 1.0)
        self.reconciler = Reconciler(self.api, Settings(), Metrics(CollectorRegistry()), Liveness())  # type: ignore[arg-type]

    def decide(self, *given: Any) -> list[Any]:
        self.times.append(asyncio.get_running_loop().time())
        return self._decide(*given)

    async def until(self, number: int) -> list[float]:
        """Wait for that number of passes, and return the pauses between them."""
        while len(self.times) < number:
            await asyncio.sleep(CEILING_SECONDS)
            assert self.times[-1] >= asyncio.get_running_loop().time() - CEILING_SECONDS, (
                "a plan that fails is tried again"
            )
        return [after - before for before, after in pairwise(self.times)]


@pytest.mark.parametrize("decide", [refused, broken])
def test_pause_has_a_ceiling_after_two_thousand_failures(
    decide: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "trainwright_operator")
    passes = Passes(monkeypatch, decide)

    async def story() -> None:
        passes.reconciler.wake("default", "demo")
        pauses = await passes.until(FAILURES)
        assert pauses[0] <= 2.0
        assert max(pauses) <= CEILING_SECONDS
        assert min(pauses[10:]) >= 0.75 * CEILING_SECONDS, "the API server is not asked all the time"
        await passes.reconciler.stop()

    run_jumping(story())


def test_plans_that_fail_together_do_not_try_again_together(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch, refused)

    async def story() -> None:
        passes.reconciler.wake("default", "demo")
        late = (await passes.until(120))[10:]
        assert max(late) - min(late) > CEILING_SECONDS / 6
        await passes.reconciler.stop()

    run_jumping(story())


def test_success_ends_the_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch, refused)

    async def story() -> None:
        passes.reconciler.wake("default", "demo")
        await passes.until(50)
        passes.api.is_down = False
        await asyncio.sleep(2 * CEILING_SECONDS)
        passes.api.is_down = True
        since = len(passes.times)
        pauses = await passes.until(since + 50)
        assert pauses[since - 1] <= 2.0
        assert pauses[since] <= 2.0, "the first pause of a new row of failures"
        await passes.reconciler.stop()

    run_jumping(story())


def test_gang_that_the_cluster_ended_two_thousand_times_is_tried_again_within_minutes() -> None:
    world = World()
    end = lose_jobs(world)
    world.run(until=lambda: world.status.waiting is not None and world.status.waiting.next_try is not None)
    (record,) = (one for one in world.stored.values() if one.role == StoredRole.ATTEMPT)
    lost = LostAttempt(2_000, 2_000, Reason.JOB_DELETED, "it was deleted", world.generation)
    base = record.name.rpartition("-")[0]
    del world.stored[record.name]
    world.stored[f"{base}-2000"] = replace(
        record, name=f"{base}-2000", data={ATTEMPT_KEY: documents.dumps(lost)}, created_at=world.now
    )
    began = world.now
    world.run(until=lambda: any(name.endswith("-2001") for name in world.stored))
    assert 600 <= (world.now - began).total_seconds() <= 630
    waiting = world.status.waiting
    assert waiting is not None
    assert waiting.next_try is not None
    assert 0 < (waiting.next_try - world.now).total_seconds() <= 600
    end()
    world.run()
    assert world.succeeded == "True"
