"""Plans over which a pass breaks: they end with `InternalError`, hold no devices and keep their metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from flow_api import MemoryApi
from flow_harm import running
from flow_world import World as FlowWorld
from prometheus_client import CollectorRegistry

from trainwright_operator import plan_resource
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.flow import decide as decisions
from trainwright_operator.flow.names import GANG_LABEL, PLAN_UID_LABEL, ROLE_LABEL, Names
from trainwright_operator.flow.quarantine import DecisionError, is_quarantined, released
from trainwright_operator.kube import decision_runner, isolation, reconciler
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

PLAN = "/apis/trainwright.dev/v1alpha1/namespaces/default/trainingplans/demo"
JOB = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs/demo-links"
MAPS = "/api/v1/namespaces/default/configmaps"
KEY = ("default", "demo")


def metadata(name: str, **labels: str) -> dict[str, Any]:
    labels = {PLAN_UID_LABEL: "uid-1"} | ({ROLE_LABEL: labels["role"]} if labels else {})
    owners = [{"kind": "TrainingPlan", "name": "demo", "uid": "uid-1"}]
    created = "2026-01-01T00:00:00Z"
    return {
        "name": name,
        "namespace": "default",
        "labels": labels,
        "creationTimestamp": created,
        "ownerReferences": owners,
    }


def objects() -> dict[str, dict[str, Any]]:
    gpt = {"layers": 2, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
    plan = {
        "metadata": metadata("demo") | {"uid": "uid-1", "generation": 3},
        "spec": {"model": {"gpt": gpt}, "training": {"globalBatchSize": 8}},
        "status": {"observedGeneration": 3},
    }
    return {
        PLAN: plan,
        JOB: {"metadata": metadata("demo-links")},
        f"{MAPS}/demo-links-order": {"metadata": metadata("demo-links-order", role="order")},
        f"{MAPS}/demo-discovery": {"metadata": metadata("demo-discovery", role="document")},
        f"{MAPS}/copy": {"metadata": metadata("copy", role="order") | {"ownerReferences": []}},
    }


class World:
    """Reconciler of one plan whose passes break."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, api: MemoryApi | None = None) -> None:
        self.api = api or MemoryApi(objects())
        self.registry = CollectorRegistry()
        self.passes = 0
        self.metric_at_rest: float | None = None
        monkeypatch.setattr(reconciler, "decide", self.decide)
        monkeypatch.setattr(Reconciler, "_pause", self.pause)
        self.reconciler = Reconciler(self.api, Settings(), Metrics(self.registry), Liveness())  # type: ignore[arg-type]
        self.paused = asyncio.Event()

    def decide(self, *_: Any) -> list[Any]:
        self.passes += 1
        raise KeyError("memory")

    async def pause(self, key: tuple[str, str], seconds: float, **_: Any) -> None:
        """Go on at once after short pauses; end at the long one of a plan at rest."""
        if seconds > 60 or self.passes > 9:
            labels = {"plan_namespace": "default", "name": "demo"}
            self.metric_at_rest = self.registry.get_sample_value("trainwright_plan_internal_error", labels)
            self.paused.set()
            await asyncio.Event().wait()

    def run(self) -> None:
        """Run passes until the plan rests."""

        async def run() -> None:
            self.reconciler.wake(*KEY)
            await asyncio.wait_for(self.paused.wait(), 20)

        asyncio.run(run())

    @property
    def answer(self) -> dict[str, Any]:
        conditions = self.api.objects[PLAN]["status"]["conditions"]
        return next(one for one in conditions if one["type"] == "Succeeded")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_plan_is_quarantined_after_three_broken_passes_with_its_gangs_deleted(world: World):
    world.run()
    assert world.passes == 3
    assert (world.answer["status"], world.answer["reason"]) == ("False", "InternalError")
    assert "KeyError: 'memory'" in world.answer["message"]
    assert JOB not in world.api.objects
    assert f"{MAPS}/demo-links-order" not in world.api.objects
    assert f"{MAPS}/demo-discovery" in world.api.objects  # measurements are kept
    assert f"{MAPS}/copy" in world.api.objects, "the plan does not own it"
    assert world.metric_at_rest == 1
    assert world.registry.get_sample_value("trainwright_reconcile_errors_total") == 3


def test_large_plan_over_which_its_process_breaks_is_quarantined(world: World, monkeypatch: pytest.MonkeyPatch):
    async def decide_apart(*_: Any) -> list[Any]:
        raise DecisionError("KeyError: 'links' (in trainwright/measurement/link_kinds.py, line 7, of)")

    monkeypatch.setattr(decision_runner, "LARGE_BYTES", 0)
    monkeypatch.setattr(decision_runner.DecisionRunner, "decide", decide_apart)
    world.run()
    assert world.passes == 0
    assert ": KeyError: 'links' (in trainwright/measurement/link_kinds.py, line 7, of)" in world.answer["message"]


def test_plan_with_hidden_fields_is_not_woken_by_its_pods(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reconciler, "decide", decisions.decide)
    world.api.objects[PLAN]["metadata"]["managedFields"] = [{"fieldsV1": {"f:spec": {"f:future": {}}}}]

    async def is_woken() -> bool:
        world.reconciler.wake(*KEY)
        await asyncio.wait_for(world.paused.wait(), 20)
        world.reconciler.wake_owner("uid-1")
        return world.reconciler._wake_events[KEY].is_set()

    assert not asyncio.run(is_woken())
    assert [path.split("/")[-2] for _, path in world.api.writes] == ["leases", "events"]


def test_plan_with_a_task_of_a_newer_version_keeps_its_gang(world: World, monkeypatch: pytest.MonkeyPatch):
    def decide(*arguments: Any) -> list[Any]:
        world.passes += 1
        return decisions.decide(*arguments)

    monkeypatch.setattr(reconciler, "decide", decide)
    measuring = FlowWorld()
    measuring.run(until=lambda: running(measuring, "links"))
    task = next(stored for stored in measuring.stored.values() if stored.gang == "links")
    found = world.api.objects
    base = Names.of(*KEY[1:], "uid-1", TrainingPlanSpec.model_validate(found[PLAN]["spec"])).base
    meta = metadata(f"{base}-links-order", role="order")
    meta["labels"][GANG_LABEL] = "links"
    newer = json.dumps(json.loads(task.data["order.json"]) | {"future": 1})
    found[f"{MAPS}/{meta['name']}"] = {"metadata": meta, "data": {"order.json": newer}}
    del found[f"{MAPS}/demo-links-order"]
    world.run()
    assert world.answer["reason"] == "NeedsNewerVersion"
    assert JOB in found
    assert f"{MAPS}/{meta['name']}" in found


def test_quarantine_survives_a_restart_of_the_same_version(world: World, monkeypatch: pytest.MonkeyPatch):
    world.run()
    again = World(monkeypatch, world.api)
    again.run()
    assert again.passes == 0


@pytest.mark.parametrize("change", ["edit", "version"])
def test_quarantined_plan_is_taken_up_again_after_an_edit_or_by_another_version(world: World, change: str):
    world.run()
    plan = plan_resource.plan_facts(world.api.objects[PLAN], "worker:1")
    assert is_quarantined(released(plan, isolation.VERSION))
    if change == "edit":
        world.api.objects[PLAN]["metadata"]["generation"] = 4
        plan = plan_resource.plan_facts(world.api.objects[PLAN], "worker:1")
    assert not is_quarantined(released(plan, isolation.VERSION if change == "edit" else "another"))


def test_plan_that_cannot_even_be_read_is_quarantined(world: World, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RecursionError("spec")

    with monkeypatch.context() as patched:
        patched.setattr(plan_resource, "plan_facts", fail)

        async def breaks() -> None:
            try:
                fail()
            except RecursionError as error:
                await world.reconciler._record_break(KEY, error, 3)

        asyncio.run(breaks())
    assert world.answer["reason"] == "InternalError"
    assert "RecursionError: spec" in world.answer["message"]


def test_message_names_the_place_in_the_operator(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reconciler, "decide", lambda snapshot, now: plan_resource.parse_time(None))  # type: ignore[arg-type]
    monkeypatch.setattr(Reconciler, "_pause", world.pause)
    world.run()
    assert "(in trainwright_operator/plan_resource.py, line" in world.answer["message"]


def test_one_broken_pass_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch):
    def once(*_: Any) -> list[Any]:
        world.passes += 1
        if world.passes % 3:
            raise KeyError("memory")
        return []

    monkeypatch.setattr(reconciler, "decide", once)
    world.run()
    assert "conditions" not in world.api.objects[PLAN]["status"]


def test_quarantine_that_the_api_server_refuses_is_tried_again(world: World):
    async def refuse() -> float:
        world.api.refused = 500
        return await world.reconciler._record_break(KEY, KeyError("memory"), 3)

    assert asyncio.run(refuse()) == reconciler._QUARANTINE_RETRY_SECONDS
    world.api.refused = 0
    world.run()
    assert world.answer["reason"] == "InternalError"
