"""Queues and Workloads of Kueue as a real API server stores them by the definitions of each tested release."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from flow_world import START, World, node, spec_of
from kubernetes.config import kube_config
from markdown_pages import DOCS, Page
from operator_process import patch_status
from real_api_server import ApiServer, job_set_definition, kueue_definitions

from local_cluster.binaries import KUEUE_RELEASE, KUEUES
from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.kueue import MAX_POD_SETS
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import FlavorFacts, JobFacts
from trainwright_operator.kube import object_facts
from trainwright_operator.kube.client import Api, connect
from trainwright_operator.kube.queue_reader import QueueReader
from trainwright_operator.kube.requests.back_off import BackOff
from trainwright_operator.kube.write_guard import WriteGuard

API, FORMER_API = "kueue.x-k8s.io/v1beta2", "v1beta1"
RESOURCE = "nvidia.com/gpu"
V1BETA2_ALONE = "0.20"
"""Name here of the newest release's definitions without v1beta1, as Kueue 0.20 has them."""
GANG = Gang(nodes=(GangNode("n1", (0,), "t4"), GangNode("n2", (0, 1), "v100")))


def definitions(release: str) -> list[dict[str, Any]]:
    """Return a release's definitions; those of 0.20, which no module proxy has yet, are made from those before."""
    found = kueue_definitions(KUEUE_RELEASE if release == V1BETA2_ALONE else release)
    if release == V1BETA2_ALONE:
        for one in found:
            one["spec"]["versions"] = [part for part in one["spec"]["versions"] if part["name"] != FORMER_API]
    return found


FORMER = [pytest.param(one, marks=pytest.mark.slow) for one in KUEUES if one != KUEUE_RELEASE]


@pytest.fixture(scope="module", params=(*FORMER, KUEUE_RELEASE, V1BETA2_ALONE))
def kueue(bare_api_servers, request) -> Iterator[ApiServer]:
    """Start an API server with the definitions of JobSet and of a release of Kueue."""
    with bare_api_servers() as api:
        found = definitions(request.param)
        api.kubectl("apply", "--server-side", document=[job_set_definition(), *found])
        for one in (*found, job_set_definition()):
            api.establish(f"crd/{one['metadata']['name']}")
        yield api


@pytest.fixture
def reader(kueue: ApiServer, monkeypatch) -> QueueReader:
    return QueueReader(operators_api(kueue, monkeypatch))


def operators_api(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Api:
    """Return the operator's own client of the API server."""
    # The client has read KUBECONFIG when it was imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(server.kubeconfig))
    return connect(WriteGuard(), "test")


def read(reader: QueueReader, name: str = "research") -> Any:
    return asyncio.run(reader.queue("default", name, RESOURCE, 0.0, BackOff()))


def manifest(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def queue_of_the_docs() -> list[dict[str, Any]]:
    """Return the objects that docs/queues.md shows, and the two flavors that it describes."""
    shown = [yaml.safe_load(one.text) for one in Page(DOCS / "queues.md").fences if one.language == "yaml"]
    named = {"t4": "Tesla-T4", "a100": "NVIDIA-A100-SXM4-40GB"}
    flavors = [
        manifest("ResourceFlavor", name, {"nodeLabels": {f"{RESOURCE}.product": product}})
        for name, product in named.items()
    ]
    return [*shown, *flavors]


def test_queue_of_the_docs_is_read_with_its_flavors_and_quotas(kueue: ApiServer, reader: QueueReader) -> None:
    kueue.kubectl("apply", "--server-side", document=queue_of_the_docs())
    found = read(reader)
    assert found.is_usable, found.problem
    label = "nvidia.com/gpu.product"
    assert found.flavors == (
        FlavorFacts("v100", {label: "Tesla-V100-SXM2-16GB"}, 16),
        FlavorFacts("t4", {label: "Tesla-T4"}, 8),
        FlavorFacts("a100", {label: "NVIDIA-A100-SXM4-40GB"}, 8),
    )
    assert "has no LocalQueue" in read(reader, "another").problem


def test_topologies_cohorts_and_stopped_queues_are_read(kueue: ApiServer, reader: QueueReader) -> None:
    quota = {"name": RESOURCE, "nominalQuota": 4, "borrowingLimit": 2}
    group = {"coveredResources": [RESOURCE], "flavors": [{"name": "placed", "resources": [quota]}]}
    kueue.kubectl(
        *("apply", "--server-side"),
        document=[
            manifest("Topology", "hosts", {"levels": [{"nodeLabel": "kubernetes.io/hostname"}]}),
            manifest("ResourceFlavor", "placed", {"nodeLabels": {"pool": "a"}, "topologyName": "hosts"}),
            manifest("ClusterQueue", "shared", {"cohortName": "all", "resourceGroups": [group]}),
            manifest("LocalQueue", "placed", {"clusterQueue": "shared"}, namespace="default"),
        ],
    )
    assert read(reader, "placed").flavors == (FlavorFacts("placed", {"pool": "a"}, 6, "hosts"),)
    stop = json.dumps({"spec": {"stopPolicy": "Hold"}})
    kueue.kubectl("patch", "localqueue", "placed", "--namespace", "default", "--type=merge", "--patch", stop)
    assert "its LocalQueue has a stopPolicy" in read(reader, "placed").problem


def gang_in_a_queue(api: ApiServer) -> tuple[dict[str, Any], JobFacts]:
    """Create the JobSet of a gang, as the API server validates it, and return it with its facts."""
    snapshot = World(
        nodes=(node("n1", devices=1), node("n2", devices=2)), spec=spec_of(queueName="research")
    ).snapshot()
    launcher = LAUNCHERS[LauncherKind.JOB_SET]
    (made,) = launcher.manifests(ReconcileContext(snapshot, START), GangSpec("links", LinkTask(gang=GANG), 60, 60))
    made["metadata"] |= {"namespace": "default", "ownerReferences": []}
    api.kubectl("delete", "jobsets,workloads", "--all", "--namespace", "default")
    api.kubectl("create", "--validate=strict", document=made)
    stored = api.get("jobset", made["metadata"]["name"], "--namespace", "default")
    return stored, object_facts.job_facts(stored, launcher)


def workload_of(job: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return the Workload that Kueue's controller makes of a JobSet."""
    pod_sets = [
        {
            "name": one["name"],
            "count": one["template"]["spec"]["parallelism"],
            "template": one["template"]["spec"]["template"],
        }
        for one in job["spec"]["replicatedJobs"]
    ]
    uid = job["metadata"]["uid"]
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": uid,
        "controller": True,
    }
    meta = {"namespace": "default", "labels": {"kueue.x-k8s.io/job-uid": uid}, "ownerReferences": [owner]}
    return manifest("Workload", "jobset-links", {"queueName": "research", "podSets": pod_sets, **spec}, **meta)


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    moment = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}


def told(reader: QueueReader, job: JobFacts) -> JobFacts:
    (found,) = asyncio.run(reader.with_messages("default", [job], BackOff()))
    return found


def test_gang_is_suspended_and_its_workload_says_why(kueue: ApiServer, reader: QueueReader) -> None:
    stored, job = gang_in_a_queue(kueue)
    assert (job.suspended, job.queue) == (True, "research")
    assert "Kueue has no Workload of JobSet" in told(reader, job).queue_message
    kueue.create(workload_of(stored))
    assert "not looked at it yet" in told(reader, job).queue_message
    waits = condition("QuotaReserved", "False", "Pending", "insufficient unused quota, 2 more needed")
    patch_status(kueue, "workload", "jobset-links", {"conditions": [waits]})
    assert told(reader, job).queue_message == waits["message"]
    evicted = condition("Evicted", "True", "Preempted", "Preempted to accommodate a higher priority")
    patch_status(kueue, "workload", "jobset-links", {"conditions": [waits, evicted]})
    assert told(reader, job).queue_message == evicted["message"]
    assert not told(reader, job).deactivated


def test_workload_that_kueue_gave_up_is_deactivated(kueue: ApiServer, reader: QueueReader) -> None:
    stored, job = gang_in_a_queue(kueue)
    kueue.create(workload_of(stored, active=False))
    assert told(reader, job).deactivated


def test_cluster_without_kueue_is_told_from_one_with_it(api_server: ApiServer, monkeypatch) -> None:
    assert not read(QueueReader(operators_api(api_server, monkeypatch))).is_installed


def test_no_more_groups_are_made_than_a_workload_of_the_newest_release_takes() -> None:
    (workload,) = [one for one in kueue_definitions(KUEUE_RELEASE) if one["spec"]["names"]["plural"] == "workloads"]
    (version,) = [one for one in workload["spec"]["versions"] if one["name"] == API.rpartition("/")[2]]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["properties"]["podSets"]["maxItems"] == MAX_POD_SETS
