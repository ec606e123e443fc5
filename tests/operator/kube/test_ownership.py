"""Objects that only carry a plan's labels: neither read nor waited for; ownership goes by uid."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from flow_api import MemoryApi
from flow_world import World

from trainwright_operator.flow.snapshot import Snapshot
from trainwright_operator.kube import object_facts
from trainwright_operator.kube.client import Api
from trainwright_operator.kube.snapshot_reader import ReadCache, SnapshotReader
from trainwright_operator.kube.watch import watch_event
from trainwright_operator.settings import Settings

PLAN = World().snapshot().plan
JOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
CORE = "/api/v1/namespaces/default"
OF_PLAN = {"apiVersion": "trainwright.dev/v1alpha1", "kind": "TrainingPlan", "name": "demo", "uid": PLAN.uid}
OF_JOB = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "gang", "uid": "uid-of-gang"}
OF_SET = {"apiVersion": "batch/v1", "kind": "Job", "name": "gang-s0-0", "uid": "uid-of-job"}
KUBEFLOW = {"training.kubeflow.org/job-name": "gang", "training.kubeflow.org/replica-type": "master"}
JOBSET = {"jobset.sigs.k8s.io/jobset-name": "gang", "jobset.sigs.k8s.io/replicatedjob-name": "s0"}


def resource(name: str, *owners: dict[str, str], uid: str = "", **labels: str) -> dict[str, Any]:
    """Return an object with the plan's labels and these owners."""
    own = {"trainwright.dev/plan-uid": PLAN.uid, "trainwright.dev/gang": "links", "trainwright.dev/role": "order"}
    meta = {"name": name, "uid": uid or f"uid-of-{name}", "labels": own | labels, "ownerReferences": list(owners)}
    return {"metadata": meta | {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {}}


def pod(name: str, *owners: dict[str, str], **labels: str) -> dict[str, Any]:
    return resource(name, *owners, **(labels or KUBEFLOW))


def read(**objects: list[dict[str, Any]]) -> Snapshot:
    """Return the snapshot of a cluster with these jobs, pods and ConfigMaps."""
    paths = {"jobs": JOBS, "pods": f"{CORE}/pods", "maps": f"{CORE}/configmaps"}
    stored = {f"{paths[kind]}/{one['metadata']['name']}": one for kind, found in objects.items() for one in found}
    reader = SnapshotReader(cast("Api", MemoryApi(stored)), Settings())
    facts = World().snapshot()
    return asyncio.run(reader.snapshot(facts.plan, ReadCache(), facts.planner))


def test_only_objects_with_the_plans_uid_among_their_owners_are_read() -> None:
    other = OF_PLAN | {"uid": "uid-of-another"}
    handed_over = resource("demo-job")
    handed_over["metadata"]["annotations"] = {"trainwright.dev/plan-uid": PLAN.uid}
    found = read(
        jobs=[resource("gang", OF_PLAN), resource("copy"), resource("foreign", other)],
        maps=[resource("task", OF_PLAN), resource("copy"), resource("foreign", other), handed_over],
    )
    assert [job.name for job in found.jobs] == ["gang"]
    assert [one.name for one in found.stored] == ["task", "demo-job"]


def test_only_pods_of_the_gangs_present_job_are_read() -> None:
    pods = [pod("own", OF_JOB), pod("copy"), pod("of-another-kind", OF_JOB | {"kind": "ReplicaSet"})]
    pods += [pod("of-another-job", OF_JOB | {"name": "other"}), pod("of-a-former-job", OF_JOB | {"uid": "uid-before"})]
    found = read(jobs=[resource("gang", OF_PLAN)], pods=pods)
    assert [one.name for one in found.pods] == ["own"]


def test_pods_whose_job_is_gone_are_still_read() -> None:
    assert [one.name for one in read(pods=[pod("left", OF_JOB)]).pods] == ["left"]


@pytest.mark.parametrize(
    ("owner", "is_ours"),
    [(OF_SET, True), (OF_SET | {"name": "gang-s1-0"}, False), (OF_SET | {"kind": "JobSet"}, False), (None, False)],
)
def test_pod_of_a_jobset_belongs_to_the_job_of_its_group(owner: dict[str, str] | None, is_ours: bool) -> None:
    owners = [owner] if owner is not None else []
    assert object_facts.is_of_gang(pod("p", *owners, **JOBSET)) == is_ours


@pytest.mark.parametrize(("is_owned", "deleted"), [(True, False), (False, True)])
def test_event_of_an_object_that_is_not_owned_counts_as_its_deletion(is_owned: bool, deleted: bool) -> None:
    body = pod("p", OF_JOB)
    event = watch_event(body, object_facts.pod_facts(body), "MODIFIED", is_owned=is_owned)
    assert (event.deleted, event.owner) == (deleted, PLAN.uid)


def test_pod_that_does_not_start_names_the_config_maps_that_it_lacks() -> None:
    volumes = [{"name": name, "configMap": {"name": name}} for name in ("encoder", "present")]
    waiting = pod("waiting", OF_JOB)
    waiting["spec"] = {"nodeName": "n1", "volumes": volumes}
    waiting["status"] = {"phase": "Pending"}
    found = read(jobs=[resource("gang", OF_PLAN, uid="uid-of-gang")], pods=[waiting], maps=[resource("present")])
    assert [one.missing_maps for one in found.pods] == [("encoder",)]
