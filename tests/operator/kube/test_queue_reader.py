"""Reading of Kueue's queues, and of what it says about suspended jobs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from flow_api import MemoryApi
from flow_world import RESOURCE, START

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.snapshot import FlavorFacts, JobFacts, QueueFacts
from trainwright_operator.kube import object_facts
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.queue_reader import QueueReader
from trainwright_operator.kube.requests.back_off import BackOff

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
TEAM = f"{KUEUE}/namespaces/team-a"


def flavor(name: str, quota: str, **further: str) -> dict[str, Any]:
    return {"name": name, "resources": [{"name": "cpu", "nominalQuota": 1}, {"name": RESOURCE, "nominalQuota": quota, **further}]}  # fmt: skip


def cluster(**spec: Any) -> dict[str, dict[str, Any]]:
    """Return the objects of a queue with a flavor for each of two accelerators."""
    group = {"coveredResources": ["cpu", RESOURCE], "flavors": [flavor("v100", "4"), flavor("t4", "2", borrowingLimit="1")]}  # fmt: skip
    found = {
        f"{TEAM}/localqueues/research": {"spec": {"clusterQueue": "devices"}},
        f"{KUEUE}/clusterqueues/devices": {"spec": {"resourceGroups": [group]} | spec},
        f"{KUEUE}/resourceflavors/v100": {"spec": {"nodeLabels": {"product": "v100"}}},
        f"{KUEUE}/resourceflavors/t4": {"spec": {"nodeLabels": {"product": "t4"}, "topologyName": "hosts"}},
        f"{KUEUE}/topologies/hosts": {
            "spec": {"levels": [{"nodeLabel": "rack"}, {"nodeLabel": "kubernetes.io/hostname"}]}
        },
    }
    return {path: {"metadata": {"name": path.rsplit("/", 1)[1]}, **body} for path, body in found.items()}


def read(objects: dict[str, dict[str, Any]], *, refused: int = 0) -> QueueFacts:
    api = MemoryApi(objects)
    api.refused = refused
    return asyncio.run(QueueReader(cast("Api", api)).queue("team-a", "research", RESOURCE, 1.0, BackOff()))


def test_queue_has_the_flavors_of_the_devices_with_their_quotas() -> None:
    assert read(cluster()).flavors == (
        FlavorFacts("v100", {"product": "v100"}, 4),
        FlavorFacts("t4", {"product": "t4"}, 2, "hosts"),
    )


@pytest.mark.parametrize("levels", [[{"nodeLabel": "rack"}], []])
def test_topology_may_end_above_the_nodes(levels: list[dict[str, str]]) -> None:
    topology = {f"{KUEUE}/topologies/hosts": {"metadata": {"name": "hosts"}, "spec": {"levels": levels}}}
    assert [one.reaches_nodes for one in read(cluster() | topology).flavors] == [True, False]


def test_quota_in_a_cohort_ends_at_the_borrowing_limit() -> None:
    assert [one.quota for one in read(cluster(cohortName="all")).flavors] == [None, 3]


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("localqueues/research", "namespace team-a has no LocalQueue"),
        ("clusterqueues/devices", "ClusterQueue 'devices' does not exist"),
        ("resourceflavors/t4", "ResourceFlavor t4 of ClusterQueue devices does not exist"),
    ],
)
def test_missing_part_of_a_queue_is_named(without: str, words: str) -> None:
    assert words in read({path: one for path, one in cluster().items() if not path.endswith(without)}).problem


def test_local_queue_without_a_cluster_queue_takes_none_of_others() -> None:
    objects = cluster()
    (path,) = [one for one in objects if "/localqueues/" in one]
    objects[path] = {**objects[path], "spec": {}}
    assert "ClusterQueue '' does not exist" in read(objects).problem


def test_queue_that_is_stopped_or_has_no_devices_cannot_be_used() -> None:
    assert "stopPolicy" in read(cluster(stopPolicy="Hold")).problem
    assert f"does not cover {RESOURCE}" in read(cluster(resourceGroups=[])).problem


def test_missing_definitions_are_told_from_missing_rights() -> None:
    assert not read({}, refused=404).is_installed
    assert "may not read it" in read({}, refused=403).problem
    with pytest.raises(ApiError):
        read({}, refused=500)


SUSPENDED = JobFacts("gang", "links", START, uid="u1", launcher=LauncherKind.JOB_SET, suspended=True)


def told(
    workload: dict[str, Any] | None, job: JobFacts = SUSPENDED, *, refused: int = 0, owner: str = SUSPENDED.uid
) -> JobFacts:
    labels = {"kueue.x-k8s.io/job-uid": "u1"}
    api = MemoryApi(
        {f"{TEAM}/workloads/w": {"metadata": {"labels": labels, "ownerReferences": [{"uid": owner}]}} | workload}
        if workload
        else {}
    )
    api.refused = refused
    (found,) = asyncio.run(QueueReader(cast("Api", api)).with_messages("team-a", [job], BackOff()))
    return found


def conditions(**found: tuple[str, str]) -> dict[str, Any]:
    listed = [{"type": kind, "status": status, "message": message} for kind, (status, message) in found.items()]
    return {"status": {"conditions": listed}}


def test_suspended_job_has_kueues_newest_words() -> None:
    waiting = ("False", "2 more needed")
    assert told(conditions(QuotaReserved=waiting)).queue_message == "2 more needed"
    assert told(conditions(QuotaReserved=waiting, Evicted=("True", "preempted"))).queue_message == "preempted"
    assert told(conditions(QuotaReserved=waiting, Evicted=("False", "back"))).queue_message == "2 more needed"
    assert "no Workload of JobSet gang" in told(None).queue_message
    assert "not looked at it" in told({"status": {}}).queue_message


def test_inactive_workload_is_a_job_that_kueue_gave_up() -> None:
    assert told({"spec": {"active": False}}).deactivated
    assert not told({"spec": {"active": True}}).deactivated
    assert not told({"spec": {"active": False}}, owner="u2").deactivated, "the label alone makes it none of the job's"


def test_job_that_runs_or_is_suspended_without_kueue_stays_as_it_is() -> None:
    running = JobFacts("gang", "links", START, uid="u1")
    assert told(conditions(QuotaReserved=("False", "x")), running) == running
    assert told(None, refused=404) == SUSPENDED


@pytest.mark.parametrize("kind", LauncherKind)
@pytest.mark.parametrize(
    ("suspend", "ended", "resumed", "expected"),
    [(True, False, False, (True, False)), (False, False, True, (False, True)), (True, True, True, (False, True))],
)
def test_facts_of_a_job_say_whether_and_since_when_it_may_have_pods(
    kind: LauncherKind, suspend: bool, ended: bool, resumed: bool, expected: tuple[bool, bool]
) -> None:
    launcher = LAUNCHERS[kind]
    found = [{"type": launcher.succeeded_condition, "status": "True"}] if ended else []
    found += [{"type": "Suspended", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}] if resumed else []
    labels = {"kueue.x-k8s.io/queue-name": "default"}
    meta = {"name": "gang", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels}
    spec = {"suspend": suspend} if kind is LauncherKind.JOB_SET else {"runPolicy": {"suspend": suspend}}
    facts = object_facts.job_facts({"metadata": meta, "spec": spec, "status": {"conditions": found}}, launcher)
    assert (facts.suspended, facts.resumed_at == START) == expected
    assert facts.queue == "default"
