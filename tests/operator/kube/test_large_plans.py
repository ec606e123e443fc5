"""Passes over large plans, which wait for the one process that decides on them: small plans go on meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from flow_api import MemoryApi
from prometheus_client import CollectorRegistry

from trainwright_operator.flow.names import PLAN_UID_LABEL, ROLE_LABEL
from trainwright_operator.flow.snapshot import Snapshot
from trainwright_operator.kube import decision_runner, reconciler
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

PLANS = "/apis/trainwright.dev/v1alpha1/namespaces/default/trainingplans"
MAPS = "/api/v1/namespaces/default/configmaps"
LARGE = [f"large-{number}" for number in range(20)]
SPEC = {
    "model": {"gpt": {"layers": 2, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}},
    "training": {"globalBatchSize": 8},
}


def metadata(name: str, plan: str, **more: Any) -> dict[str, Any]:
    labels = {PLAN_UID_LABEL: f"uid-{plan}", ROLE_LABEL: "document"}
    owners = {"ownerReferences": [{"uid": f"uid-{plan}"}], "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"name": name, "namespace": "default", "labels": labels, **owners} | more


def objects() -> dict[str, dict[str, Any]]:
    plans = {
        f"{PLANS}/{name}": {"metadata": metadata(name, name, uid=f"uid-{name}", generation=1), "spec": SPEC}
        for name in [*LARGE, "small"]
    }
    data = {"document.json": "x" * decision_runner.LARGE_BYTES}
    return plans | {f"{MAPS}/{name}-d": {"metadata": metadata(f"{name}-d", name), "data": data} for name in LARGE}


class World:
    """Reconciler of many large plans and a small one, and a decision process that answers once it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way, self.most_at_once = Counter[str](), Counter[str]()
        self.decided: set[str] = set()
        self.large_waits, self.may_answer = asyncio.Event(), asyncio.Event()
        self.small_decided, self.all_decided = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(reconciler, "decide", self.decide)
        monkeypatch.setattr(reconciler.DecisionRunner, "decide", self.decide_apart)
        registry = CollectorRegistry()
        self.reconciler = Reconciler(MemoryApi(objects()), Settings(), Metrics(registry), Liveness())  # type: ignore[arg-type]

    def decide(self, *_: Any) -> list[Any]:
        self.small_decided.set()
        return []

    async def decide_apart(self, snapshot: Snapshot, *_: Any) -> list[Any]:
        name = snapshot.plan.name
        self.under_way[name] += 1
        self.most_at_once |= self.under_way
        self.large_waits.set()
        await self.may_answer.wait()
        self.under_way[name] -= 1
        self.decided.add(name)
        if len(self.decided) == len(LARGE):
            self.all_decided.set()
        return []


def test_small_plan_is_decided_on_while_large_ones_wait_for_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(monkeypatch)
        for name in LARGE:
            world.reconciler.wake("default", name)
        async with asyncio.timeout(20):
            await world.large_waits.wait()
        world.reconciler.wake("default", "small")
        async with asyncio.timeout(5):
            await world.small_decided.wait()
        for name in LARGE:
            world.reconciler.wake("default", name)
        assert not world.decided
        world.may_answer.set()
        async with asyncio.timeout(20):
            await world.all_decided.wait()
        assert set(world.most_at_once.values()) == {1}, "one pass of a plan at a time"
        await world.reconciler.stop()

    asyncio.run(story())
