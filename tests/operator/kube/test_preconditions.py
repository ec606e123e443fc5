"""Preconditions of writes: no request changes an object other than the one that the operator read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from flow_harm import fail_pods, running
from flow_versions import VersionedApi
from flow_world import START, World

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import PLAN_UID_LABEL, ROLE_LABEL
from trainwright_operator.flow.snapshot import JobFacts, Snapshot, StoredConfigMap
from trainwright_operator.kube import client
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.isolation import isolate
from trainwright_operator.kube.object_cache import ObjectCache
from trainwright_operator.kube.search_pool import SearchPool
from trainwright_operator.kube.snapshot_reader import ReadCache

MAPS = client.core_path("configmaps", "default")
PLAN = client.plan_path("default", "demo")
JOBS = {kind: client.jobs_path(launcher.api, "default") for kind, launcher in LAUNCHERS.items()}
OWNED: dict[str, Any] = {"labels": {PLAN_UID_LABEL: "uid-1"}, "ownerReferences": [{"uid": "uid-1"}]}


def resource(name: str, uid: str, version: str = "7", **metadata: Any) -> dict[str, Any]:
    created = {"namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": version, **created, **metadata}}


def read() -> Snapshot:
    """Return a plan with one child of each kind, as they were read."""
    found = World().snapshot()
    return replace(
        found,
        plan=replace(found.plan, resource_version="7"),
        stored=(StoredConfigMap("task", "links", "order", START, {}, uid="uid-read", resource_version="7"),),
        measurements=(StoredConfigMap("kept", "", "measurement", START, {}, uid="uid-read"),),
        jobs=tuple(JobFacts(f"job-{kind}", "links", START, uid="uid-read", launcher=kind) for kind in LauncherKind),
    )


def apply(api: VersionedApi, snapshot: Snapshot, *todo: a.Action, memory: ReadCache | None = None) -> None:
    applier = Applier(api, SearchPool(), ObjectCache())
    asyncio.run(applier.apply(snapshot, todo, memory or ReadCache())).check()


DELETIONS = [
    (a.DeleteConfigMap("task"), f"{MAPS}/task", "uid-read"),
    (a.DeleteConfigMap("kept"), f"{MAPS}/kept", "uid-read"),
    (a.DeletePlan(), PLAN, "uid-1"),
    *((a.DeleteJob(f"job-{kind}"), f"{JOBS[kind]}/job-{kind}", "uid-read") for kind in LauncherKind),
]


@pytest.mark.parametrize(("action", "path", "uid"), DELETIONS)
def test_deletion_leaves_another_object_of_that_name(action: a.Action, path: str, uid: str) -> None:
    name = path.rsplit("/", 1)[1]
    api = VersionedApi({path: resource(name, "uid-of-another")})
    apply(api, read(), action)
    assert path in api.objects
    apply(api, read(), action, a.DeleteConfigMap("task"))
    assert path in api.objects, "the actions after it are applied, and an object that is gone is no failure"
    api.objects[path] = resource(name, uid)
    apply(api, read(), action)
    assert path not in api.objects


def as_resources(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return the children of a snapshot as the API server has them."""
    maps = {f"{MAPS}/{one.name}": resource(one.name, one.uid, one.resource_version) for one in snapshot.stored}
    return maps | {f"{JOBS[one.launcher]}/{one.name}": resource(one.name, one.uid) for one in snapshot.jobs}


def check_pass(world: World, todo: Sequence[a.Action]) -> Sequence[a.Action]:
    """Send the deletions and annotations of a pass; each must name the object of the snapshot. Return them."""
    found = world.snapshot()
    found = replace(
        found,
        jobs=tuple(replace(one, uid=f"uid-{one.name}") for one in found.jobs),
        stored=tuple(replace(one, resource_version=str(number)) for number, one in enumerate(found.stored, 7)),
    )
    children: list[StoredConfigMap | JobFacts] = [*found.stored, *found.jobs]
    known = {one.name: one.uid for one in children}
    versions = {one.name: one.resource_version for one in found.stored}
    sent = [one for one in todo if isinstance(one, a.DeleteConfigMap | a.DeleteJob | a.AnnotateConfigMap)]
    api = VersionedApi(as_resources(found))
    apply(api, found, *sent)
    deleted, patched = api.bodies("DELETE"), api.bodies("PATCH")
    assert {name: body["preconditions"]["uid"] for name, body in deleted.items()} == {
        name: known[name] for name in deleted
    }
    assert {name: body["metadata"]["resourceVersion"] for name, body in patched.items()} == {
        name: versions[name] for name in patched
    }
    return sent


def test_no_pass_deletes_or_annotates_what_it_did_not_read(each_launcher: LauncherKind) -> None:
    world, sent = World(), list[a.Action]()
    lost = False
    for _ in range(500):
        todo = world.decide()
        sent += check_pass(world, todo)
        world.apply(todo)
        world.pass_time(2.0)
        if not lost and running(world, "candidate-1"):
            fail_pods(world, "candidate-1", exit_code=143)
            world.pods = {name: replace(pod, reason="Evicted") for name, pod in world.pods.items()}
            lost = True
        if world.succeeded != "Unknown" and not todo:
            break
    assert world.succeeded == "True"
    assert lost
    assert {type(one) for one in sent} == {a.DeleteConfigMap, a.DeleteJob, a.AnnotateConfigMap}


def test_quarantine_leaves_another_job_of_that_name() -> None:
    path = f"{JOBS[LauncherKind.PYTORCH_JOB]}/gang"
    api = VersionedApi({PLAN: resource("demo", "uid-1"), path: resource("gang", "uid-listed", **OWNED)})
    applier = Applier(api, SearchPool(), ObjectCache())

    def replace_job() -> None:
        if path in api.objects:
            api.objects[path] = resource("gang", "uid-of-another", **OWNED)

    async def story() -> None:
        usual = api.list

        async def listed(where: str, **query: str) -> list[dict[str, Any]]:
            if where == path.rsplit("/", 1)[0]:
                api.between = replace_job
            return await usual(where, **query) if f"{where}/gang" == path else []

        api.list = listed  # type: ignore[method-assign, assignment]
        await isolate(api, applier, ("default", "demo"), KeyError("memory"))

    asyncio.run(story())
    assert api.objects[path]["metadata"]["uid"] == "uid-of-another"
    assert api.bodies("DELETE")["gang"]["preconditions"] == {"uid": "uid-listed"}
    assert api.objects[PLAN]["status"]["conditions"], "the quarantine goes on"


def test_new_measurement_replaces_only_the_one_that_was_read() -> None:
    path, labels = f"{MAPS}/kept", {ROLE_LABEL: "measurement"}
    api = VersionedApi({path: resource("kept", "uid-read", labels=labels)})
    measured = a.CreateConfigMap("kept", a.StoredRole.MEASUREMENT, {"links.json": "{}"})
    other = resource("kept", "uid-of-another", labels=labels)
    api.between = lambda: api.objects.update({path: other})
    with pytest.raises(ApiError, match="already exists"):
        apply(api, read(), measured)
    assert api.objects[path] is other
    apply(api, read(), measured)
    assert api.objects[path]["data"] == {"links.json": "{}"}


def test_status_is_not_written_over_a_change_that_was_not_read() -> None:
    api, memory = VersionedApi({PLAN: resource("demo", "uid-1", "8")}), ReadCache()
    told = a.EmitEvent(a.EventType.NORMAL, "Accepted", "Accepted: checked")
    with pytest.raises(ApiError) as refusal:
        apply(api, read(), a.SetStatus(TrainingPlanStatus()), told, memory=memory)
    assert refusal.value.is_conflict
    assert "status" not in api.objects[PLAN]
    assert [method for method, _, _ in api.sent] == ["PATCH"], "no Event tells of a status that was not written"
    assert memory.failing is None, "the next reconciliation decides anew; there is nothing to report"


def test_status_is_not_written_to_another_plan_of_that_name() -> None:
    api = VersionedApi({PLAN: resource("demo", "uid-of-another")})
    with pytest.raises(ApiError):
        apply(api, read(), a.SetStatus(TrainingPlanStatus()))
    assert "status" not in api.objects[PLAN]


def test_status_is_written_again_without_reading_the_plan_anew() -> None:
    api, cache = VersionedApi({PLAN: resource("demo", "uid-1")}), ObjectCache()
    applier = Applier(api, SearchPool(), cache)
    found = read()
    for _ in range(3):
        asyncio.run(applier.apply(found, [a.SetStatus(TrainingPlanStatus())], ReadCache())).check()
        plan = cache.plan(("default", "demo"))
        assert plan is not None
        found = replace(found, plan=plan)
    assert api.objects[PLAN]["metadata"]["resourceVersion"] == "10"


def test_annotation_is_not_added_to_a_changed_config_map() -> None:
    path, memory = f"{MAPS}/task", ReadCache()
    api = VersionedApi({path: resource("task", "uid-read", "8"), PLAN: resource("demo", "uid-1")})
    annotated, told = a.AnnotateConfigMap("task", {"pinned": "now"}), a.SetStatus(TrainingPlanStatus())
    with pytest.raises(ApiError) as refusal:
        apply(api, read(), annotated, told, memory=memory)
    assert refusal.value.is_conflict
    assert "annotations" not in api.objects[path]["metadata"]
    assert "status" not in api.objects[PLAN], "it was decided from what is out of date"
    assert memory.failing is None
    api.objects[path] = resource("task", "uid-read", "7")
    apply(api, read(), annotated)
    assert api.objects[path]["metadata"]["annotations"] == {"pinned": "now"}
