"""Slots for passes: what waits for placement or for the decision process keeps none; events share a pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from flow_api import MemoryApi
from flow_clock import run_jumping
from flow_world import RESOURCE, spec_of
from prometheus_client import CollectorRegistry

from trainwright_operator.flow.actions import Action, PinPod
from trainwright_operator.flow.gangs.scheduling import is_gated
from trainwright_operator.flow.names import PLACEMENT_GATE, PLAN_UID_LABEL, ROLE_LABEL
from trainwright_operator.flow.snapshot import Snapshot
from trainwright_operator.kube import apply, decision_runner, reconciler
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

PLANS = "/apis/trainwright.dev/v1alpha1/namespaces/default/trainingplans"
CORE = "/api/v1/namespaces/default"
MANY = 20
"""Number of plans, more than there are slots."""
LARGE_AT_ONCE = 3


def metadata(name: str, owner: str, **more: Any) -> dict[str, Any]:
    owned = {"ownerReferences": [{"kind": "PyTorchJob", "name": f"{owner}-job", "uid": f"uid-{owner}"}]}
    created = {"namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"}
    labels = {PLAN_UID_LABEL: f"uid-{owner}"} | more.pop("labels", {})
    return {"name": name, "labels": labels, **owned, **created, **more}


def plan(name: str) -> dict[str, dict[str, Any]]:
    spec = spec_of().model_dump(by_alias=True)
    return {f"{PLANS}/{name}": {"metadata": metadata(name, name, uid=f"uid-{name}", generation=1), "spec": spec}}


def gated_plan(name: str) -> dict[str, dict[str, Any]]:
    """Return a plan with a pod that waits for its node."""
    places = {"training.kubeflow.org/job-name": f"{name}-job", "training.kubeflow.org/replica-type": "master"}
    meta = metadata(f"{name}-pod", name, labels=places)
    return plan(name) | {
        f"{CORE}/pods/{name}-pod": {"metadata": meta, "spec": {"schedulingGates": [{"name": PLACEMENT_GATE}]}}
    }


def large_plan(name: str) -> dict[str, dict[str, Any]]:
    data = {"document.json": "x" * decision_runner.LARGE_BYTES}
    meta = metadata(f"{name}-document", name, labels={ROLE_LABEL: "document"})
    return plan(name) | {f"{CORE}/configmaps/{name}-document": {"metadata": meta, "data": data}}


class Passes:
    """Reconciler whose passes stop where they place pods, or where the decision process has them, until they may end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, objects: dict[str, dict[str, Any]]) -> None:
        self.api = MemoryApi(objects)
        self.may_end = asyncio.Event()
        self.decided: list[str] = []
        self.seen_used: dict[str, int] = {}
        """Devices in use as each plan saw them when it first placed its pods."""
        self.placing, self.most_placing = 0, 0
        self.apart: list[str] = []
        monkeypatch.setattr(reconciler, "decide", self.decide)
        monkeypatch.setattr(reconciler, "requeue_after_seconds", lambda *_: 1e6)
        monkeypatch.setattr(decision_runner.DecisionRunner, "decide", self.decide_apart)
        monkeypatch.setattr(apply.Applier, "apply", self.apply)
        self.reconciler = Reconciler(self.api, Settings(), Metrics(CollectorRegistry()), Liveness())  # type: ignore[arg-type]

    def decide(self, snapshot: Snapshot, *_: Any) -> list[Action]:
        self.decided.append(snapshot.plan.name)
        if any(map(is_gated, snapshot.pods)):
            self.seen_used.setdefault(snapshot.plan.name, snapshot.used_devices.get("n1", 0))
            return [PinPod(pod.name, "n1", ()) for pod in snapshot.pods]
        return []

    async def decide_apart(self, snapshot: Snapshot, *_: Any) -> list[Action]:
        self.apart.append(snapshot.plan.name)
        await self.may_end.wait()
        return []

    async def apply(self, snapshot: Snapshot, todo: Sequence[Action], memory: Any) -> apply.Effect:
        """Bind a pod, once it may end."""
        for one in todo:
            self.placing += 1
            self.most_placing = max(self.most_placing, self.placing)
            await self.may_end.wait()
            await asyncio.sleep(0.01)
            devices = {"resources": {"limits": {RESOURCE: "1"}}}
            bound = {"metadata": {"name": one.name}, "spec": {"nodeName": "n1", "containers": [devices]}}  # type: ignore[union-attr]
            self.api.objects[f"/api/v1/pods/{one.name}"] = bound  # type: ignore[union-attr]
            del self.api.objects[f"{CORE}/pods/{one.name}"]  # type: ignore[union-attr]
            self.reconciler._snapshot_reader.cache.forget_children(snapshot.plan.uid)
            self.placing -= 1
        return apply.Effect(has_pinned=bool(todo))

    def wake(self, *names: str) -> None:
        for name in names:
            self.reconciler.wake("default", name)

    @property
    def documents_in_memory(self) -> int:
        return sum(bool(one.stored) for one in self.reconciler._snapshot_reader.cache._children.values())


def test_plans_that_wait_for_placement_keep_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"placing-{number}" for number in range(MANY)]
    objects = {path: one for name in names for path, one in gated_plan(name).items()}

    async def story() -> None:
        passes = Passes(monkeypatch, objects | plan("small"))
        passes.wake(*names)
        await asyncio.sleep(5)
        assert passes.decided == names[:1], "the others wait until it has placed its pods"
        passes.wake("small")
        await asyncio.sleep(1)
        assert passes.decided == [names[0], "small"]
        passes.may_end.set()
        await asyncio.sleep(60)
        assert passes.most_placing == 1
        assert passes.seen_used == {name: number for number, name in enumerate(names)}, "each sees those before it"
        await passes.reconciler.stop()

    run_jumping(story())


def test_only_few_large_plans_hold_slots_and_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"large-{number}" for number in range(MANY)]
    objects = {path: one for name in names for path, one in large_plan(name).items()}

    async def story() -> None:
        passes = Passes(monkeypatch, objects | plan("small"))
        passes.wake(*names)
        await asyncio.sleep(60)
        assert len(passes.apart) == LARGE_AT_ONCE
        assert passes.documents_in_memory == LARGE_AT_ONCE
        passes.wake("small")
        await asyncio.sleep(1)
        assert passes.decided == ["small"]
        passes.may_end.set()
        await asyncio.sleep(60)
        assert sorted(passes.apart) == sorted(names), "each has its turn"
        assert passes.documents_in_memory == 0
        await passes.reconciler.stop()

    run_jumping(story())


async def rest(passes: Passes) -> None:
    """Run the first pass and forget it."""
    passes.wake("small")
    await asyncio.sleep(5)
    passes.decided.clear()


def test_events_that_come_together_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        passes = Passes(monkeypatch, plan("small"))
        await rest(passes)
        for _ in range(60):
            passes.reconciler.wake_owner("uid-small")
            await asyncio.sleep(0.003)
        assert passes.decided == []
        await asyncio.sleep(0.1)
        assert passes.decided == ["small"]
        await asyncio.sleep(60)
        assert passes.decided == ["small"]
        await passes.reconciler.stop()

    run_jumping(story())


def test_events_without_end_do_not_put_off_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        passes = Passes(monkeypatch, plan("small"))
        await rest(passes)
        for _ in range(1000):
            passes.reconciler.wake_owner("uid-small")
            await asyncio.sleep(0.01)
        assert 30 <= len(passes.decided) <= 50, "four or five a second"
        await passes.reconciler.stop()

    run_jumping(story())


def test_event_during_a_pass_leads_to_another_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        passes = Passes(monkeypatch, plan("small"))
        await rest(passes)
        decide = passes.decide

        def decide_while_a_pod_changes(*given: Any) -> list[Action]:
            if not passes.decided:
                passes.reconciler.wake_owner("uid-small")
            return decide(*given)

        monkeypatch.setattr(reconciler, "decide", decide_while_a_pod_changes)
        passes.wake("small")
        await asyncio.sleep(60)
        assert passes.decided == ["small", "small"]
        await passes.reconciler.stop()

    run_jumping(story())
