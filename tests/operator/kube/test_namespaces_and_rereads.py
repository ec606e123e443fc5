"""Watched namespaces that are gone, and pods whose logs are not read again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from flow_api import Lists, MemoryApi
from flow_world import World
from prometheus_client import CollectorRegistry

from trainwright_operator.kube import reconciler as reconciler_module
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.nodes.node_cache import NodeCache
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.snapshot_reader import ReadCache, SnapshotReader
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import SYSTEM_NAMESPACES, Settings

WITHIN_SECONDS = 15.0


class Partly(Lists):
    """API server with one plan in `team-b`, and no access to `gone` nor to all namespaces at once."""

    def __init__(self, refused: tuple[str, ...] = ("gone",), status: int = 403) -> None:
        self.refused, self.status = refused, status
        self.asked: list[str] = []
        self.asked_twice = asyncio.Event()

    async def list(self, path: str, **_query: str) -> list[dict[str, Any]]:
        self.asked.append(path)
        if len(self.asked) == 6:
            self.asked_twice.set()
        if path == "/api/v1/pods" or any(f"/namespaces/{name}/" in path for name in self.refused):
            raise ApiError(self.status, f"{path} is forbidden")
        if path.endswith("/pods"):
            return [pod("worker-0"), pod("worker-1")]
        return [{"metadata": {"namespace": "team-b", "name": "demo"}}] if "/team-b/" in path else []

    async def pages(self, path: str, **query: str) -> AsyncIterator[Any]:
        for item in await self.list(path, **query):
            yield [item]


class Counting(Liveness):
    """Liveness that counts its beats."""

    def __init__(self) -> None:
        super().__init__()
        self.beats = 0

    def record_success(self) -> None:
        self.beats += 1


def resync_twice(
    monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...], status: int = 403
) -> tuple[Counting, set[tuple[str, str]]]:
    """List the plans of three namespaces twice. Returns the health check's beats and the plans that were woken."""
    pulse, woken = Counting(), set[tuple[str, str]]()
    monkeypatch.setattr(reconciler_module, "RESYNC_SECONDS", 0.1)
    monkeypatch.setattr(Reconciler, "wake", lambda _, namespace, name: woken.add((namespace, name)))

    async def story() -> None:
        api = Partly(refused, status)
        settings = Settings(namespaces=("team-a", "gone", "team-b"))
        reconciler = Reconciler(cast("Api", api), settings, Metrics(CollectorRegistry()), pulse)
        resync = asyncio.create_task(reconciler.resync())
        await api.asked_twice.wait()
        resync.cancel()

    asyncio.run(asyncio.wait_for(story(), WITHIN_SECONDS))
    return pulse, woken


def test_operator_finds_plans_of_other_namespaces_when_one_is_deleted(monkeypatch, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        pulse, woken = resync_twice(monkeypatch, ("gone",))
    assert woken == {("team-b", "demo")}
    assert pulse.beats == 6
    (told,) = [record.getMessage() for record in caplog.records if record.name == reconciler_module.__name__]
    assert told.startswith("listing the plans of gone failed: ")


def test_plans_in_namespaces_of_kubernetes_itself_are_left_alone() -> None:
    async def story() -> set[str]:
        reconciler = Reconciler(cast("Api", MemoryApi({})), Settings(), Metrics(CollectorRegistry()), Liveness())
        for namespace in (*SYSTEM_NAMESPACES, "default"):
            reconciler.wake(namespace, "demo")
        names = {task.get_name() for task in asyncio.all_tasks()}
        await reconciler.stop()
        return names

    assert {name for name in asyncio.run(story()) if name.startswith("plan ")} == {"plan default/demo"}


def test_operator_records_no_success_without_answers(monkeypatch) -> None:
    assert resync_twice(monkeypatch, ("team-a", "gone", "team-b"), status=0)[0].beats == 0


def test_operator_is_healthy_when_all_namespaces_are_deleted(monkeypatch) -> None:
    assert resync_twice(monkeypatch, ("team-a", "gone", "team-b"))[0].beats == 6


def test_deleted_namespace_uses_no_devices() -> None:
    def held(refused: tuple[str, ...]) -> dict[str, int]:
        occupancy = NodeCache(cast("Api", Partly(refused)), ("gone", "team-b"))
        return asyncio.run(occupancy.usage("nvidia.com/gpu")).devices

    assert held(("gone",)) == {"alpha": 4}
    assert held(("gone", "team-b")) == {}


OWNED = {"ownerReferences": [{"kind": "PyTorchJob", "name": "p", "uid": "uid-p"}]}


def pod(name: str, phase: str = "Running") -> dict[str, Any]:
    """Return a pod that holds two devices and writes a log."""
    place = {"training.kubeflow.org/job-name": "p", "training.kubeflow.org/replica-index": "0"}
    labels = {"trainwright.dev/rendezvous": "true", **place}
    limits = {"nvidia.com/gpu": "2"}
    return {
        "metadata": {"name": name, "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z", **OWNED},
        "spec": {"nodeName": "alpha", "containers": [{"name": "pytorch", "resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


def test_only_logs_of_changed_pods_are_read_while_the_placement_lock_is_held() -> None:
    class Kubelet(Partly):
        phase = "Running"

        async def list(self, path: str, **_query: str) -> list[dict[str, Any]]:
            return [pod("same"), pod("changed", self.phase)] if path.endswith("/pods") else []

        async def get_text(self, path: str, **_query: str) -> str:
            self.asked.append(path.split("/")[-2])
            return f"log {len(self.asked)}"

    async def story() -> None:
        kubelet, world = Kubelet(), World().snapshot()
        observer = SnapshotReader(cast("Api", kubelet), Settings())
        first = await observer.snapshot(world.plan, ReadCache(), world.planner)
        assert sorted(kubelet.asked) == ["changed", "same"]
        kubelet.phase = "Succeeded"
        again = await observer.snapshot(world.plan, ReadCache(), world.planner, known_pods=first.pods)
        assert kubelet.asked[2:] == ["changed"]
        logs = {found.name: found.log for found in again.pods}
        assert logs == {"same": next(p.log for p in first.pods if p.name == "same"), "changed": "log 3"}

    asyncio.run(story())


@pytest.mark.parametrize("change", ["finished", "suspended"])
def test_idle_plan_lists_no_nodes_and_pods(change: str) -> None:
    class Empty(Partly):
        async def list(self, path: str, **_query: str) -> list[dict[str, Any]]:
            self.asked.append(path)
            return []

    world = World(run_seconds=1e9) if change == "finished" else World(others={"n1": 2})
    if change == "finished":
        world.run()  # it ends at a deadline, before its layers are profiled
    else:
        world.run(steps=10, until=lambda: len(world.pods) > 0)
        world.spec = world.spec.model_copy(update={"suspend": True})
    plan, asked = world.snapshot().plan, Empty()
    asyncio.run(SnapshotReader(cast("Api", asked), Settings()).snapshot(plan, ReadCache(), world.snapshot().planner))
    assert asked.asked
    assert all(f"/namespaces/{plan.namespace}/" in path for path in asked.asked)


def test_forbidden_plan_is_ignored() -> None:
    class Refusing(Partly):
        async def get(self, path: str, **_query: str) -> Any:
            raise ApiError(403, f"{path} is forbidden")

    found = SnapshotReader(cast("Api", Refusing()), Settings()).plan("gone", "demo")
    assert asyncio.run(found) is None


def test_resync_wakes_only_changed_and_deleted_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = []
    monkeypatch.setattr(Reconciler, "wake", lambda _, namespace, name: woken.append((namespace, name)))

    def listed(name: str, generation: int) -> dict[str, Any]:
        return {"metadata": {"namespace": "team-a", "name": name, "generation": generation}}

    async def story() -> None:
        reconciler = Reconciler(cast("Api", Partly()), Settings(), Metrics(CollectorRegistry()), Counting())
        for name in ("same", "changed", "gone", "early"):
            reconciler._tasks["team-a", name] = cast("asyncio.Task[None]", None)
            reconciler._generations["team-a", name] = 1
        del reconciler._generations["team-a", "early"]
        reconciler._tasks["team-b", "elsewhere"] = cast("asyncio.Task[None]", None)
        items = [listed("same", 1), listed("changed", 2), listed("new", 1), listed("early", 3)]
        reconciler._wake_changed("team-a", items)

    asyncio.run(story())
    assert sorted(woken) == [("team-a", "changed"), ("team-a", "gone"), ("team-a", "new")]
