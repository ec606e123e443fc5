"""Kubernetes objects of a gang: names, jobs by pod shape, safe pods, and the patch that pins one."""

from __future__ import annotations

import copy

import pytest
from flow_world import START, World, spec_of

from trainwright import worker_api
from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.api.pods import PodTemplate
from trainwright_operator.api.spec import LauncherKind, TrainingPlanSpec
from trainwright_operator.flow.gangs import pod_template, scheduling
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import PLACEMENT_GATE, Names
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import PodFacts


def render(*nodes: GangNode, template: dict | None = None) -> tuple[dict, ...]:
    spec = spec_of(worker={"podTemplate": template or {}})
    context = ReconcileContext(World(spec=spec).snapshot(), START)
    wanted = GangSpec("candidate-1", LinkTask(gang=Gang(nodes=nodes)), 60, 60)
    return LAUNCHERS[LauncherKind.PYTORCH_JOB].manifests(context, wanted)


def pod_of(manifest: dict, role: str = "Master") -> dict:
    return manifest["spec"]["pytorchReplicaSpecs"][role]["template"]


@pytest.mark.parametrize("name", ["gpt2", "a" * 40, "1st.try", "x.-y", "a" * 25 + "-b", "9" * 40])
def test_names_are_short_deterministic_and_dns_1035(name: str) -> None:
    names = Names.of(name, "uid", spec_of())
    assert names == Names.of(name, "uid", spec_of())
    job = names.job("candidate-32", 7)
    assert len(job) <= 52
    assert job[0].isalpha()
    assert set(job) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert "--" not in job
    assert names.base != Names.of(name, "other uid", spec_of()).base


def test_names_depend_on_the_identity_and_not_on_mutable_fields() -> None:
    base = Names.of("a", "u", spec_of())
    assert base == Names.of("a", "u", spec_of(suspend=True, ttlSecondsAfterFinished=5, trials={"topK": 7}))
    assert base != Names.of("a", "u", spec_of(worker={"image": "other"}))
    assert base != Names.of("a", "u", spec_of(trials={"iterations": 99}))


def test_names_ignore_explicit_defaults_and_fields_of_later_versions() -> None:
    class Later(TrainingPlanSpec):
        further: int = 5

    base = Names.of("a", "u", spec_of())
    assert base == Names.of("a", "u", spec_of(links={"allPairsUpToNodes": 12, "deadlineSeconds": 5000}))
    later = Later.model_validate(spec_of().model_dump(exclude_defaults=True))
    assert base == Names.of("a", "u", later)
    assert base != Names.of("a", "u", later.model_copy(update={"further": 6}))


def test_one_job_for_each_pod_shape_with_a_common_rendezvous() -> None:
    first, second = render(GangNode("a", (0, 1), "x"), GangNode("b", (0,), "x"), GangNode("c", (0, 1), "x"))
    name = first["metadata"]["name"]
    assert (first["spec"]["nprocPerNode"], second["spec"]["nprocPerNode"]) == ("2", "1")
    assert first["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    assert "Worker" not in second["spec"]["pytorchReplicaSpecs"]
    for manifest in (first, second):
        container = pod_of(manifest)["spec"]["containers"][0]
        assert container["args"] == ["--master-addr", f"{name}-master-0", "--master-port", "23456"]
    assert "trainwright.dev/rendezvous" in pod_of(first)["metadata"]["labels"]
    assert "trainwright.dev/rendezvous" not in pod_of(first, "Worker")["metadata"]["labels"]
    assert "trainwright.dev/rendezvous" not in pod_of(second)["metadata"]["labels"]


def test_jobs_fix_ranks_and_never_restart_pods() -> None:
    (job,) = render(GangNode("a", (0,), "x"), GangNode("b", (0,), "x"))
    assert "elasticPolicy" not in job["spec"]
    policy = job["spec"]["runPolicy"]
    assert policy["cleanPodPolicy"] == "None", "with Running a pod goes that has not yet said why it crashed"
    assert "backoffLimit" not in policy, "with it the training operator deletes failed pods with their last words"
    assert {r["restartPolicy"] for r in job["spec"]["pytorchReplicaSpecs"].values()} == {"Never"}
    owner = job["metadata"]["ownerReferences"][0]
    assert (owner["controller"], owner["blockOwnerDeletion"]) == (True, False)


@pytest.mark.parametrize("role", ["Master", "Worker"])
def test_pods_are_gated_and_unprivileged(role: str) -> None:
    (job,) = render(GangNode("a", (0, 1), "x"), GangNode("b", (0, 1), "x"))
    template = pod_of(job, role)
    spec, container = template["spec"], template["spec"]["containers"][0]
    assert spec["schedulingGates"] == [{"name": PLACEMENT_GATE}]
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["name"] == "pytorch"
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["resources"]["requests"] == {"nvidia.com/gpu": "2", "cpu": "1000m", "memory": "4Gi"}
    assert template["metadata"]["annotations"] == {
        "sidecar.istio.io/inject": "false",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "trainwright.dev/plan": "default/demo",
    }
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in spec["volumes"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts[worker_api.TASK_PATH.rpartition("/")[0]] == "order"
    assert mounts["/dev/shm"] == "shared-memory"
    (variable,) = container["env"]
    assert (variable["name"], variable["valueFrom"]["fieldRef"]["fieldPath"]) == (
        worker_api.NODE_NAME_VARIABLE,
        "spec.nodeName",
    )


@pytest.mark.parametrize(
    ("resources", "requests"),
    [
        ({}, {"cpu": "500m", "memory": "2Gi"}),
        ({"limits": {"memory": "1Gi"}}, {"cpu": "500m"}),
        ({"limits": {"memory": "9Gi"}, "requests": {"memory": "8Gi"}}, {"cpu": "500m", "memory": "8Gi"}),
        ({"requests": {"cpu": "4"}}, {"cpu": "4", "memory": "2Gi"}),
        ({"limits": "all of them"}, {"cpu": "500m", "memory": "2Gi"}),
    ],
)
def test_default_requests_give_way_to_what_the_user_requests_or_limits(resources, requests) -> None:
    template = {"spec": {"containers": [{"name": "pytorch", "resources": resources}]}}
    (job,) = render(GangNode("a", (0,), "x"), template=template)
    container = pod_of(job)["spec"]["containers"][0]
    assert container["resources"]["requests"] == requests | {"nvidia.com/gpu": "1"}


def test_pod_template_is_merged_without_overriding_required_fields() -> None:
    template = {
        "metadata": {"labels": {"team": "vision", "trainwright.dev/gang": "mine"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "hostNetwork": True,
            "automountServiceAccountToken": True,
            "securityContext": {"fsGroup": 7},
            "volumes": [{"name": "data", "emptyDir": {}}],
            "containers": [
                {
                    "name": "pytorch",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                    "resources": {"limits": {"rdma/hca": "1", "nvidia.com/gpu": "8"}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    given = copy.deepcopy(template)
    (job,) = render(GangNode("a", (0,), "x"), template=template)
    assert template == given
    pod = pod_of(job)
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert spec["tolerations"] == [{"operator": "Exists"}, {"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["metadata"]["labels"]["trainwright.dev/gang"] == "candidate-1"
    assert spec["hostNetwork"] is True
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["fsGroup"] == 7
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert {volume["name"] for volume in spec["volumes"]} == {"data", "shared-memory", "order"}
    assert [env["name"] for env in container["env"]] == ["NCCL_DEBUG", worker_api.NODE_NAME_VARIABLE]
    assert container["resources"]["limits"] == {"rdma/hca": "1", "nvidia.com/gpu": "1"}
    assert container["image"] == "worker:1"
    assert [c["name"] for c in spec["containers"]] == ["pytorch", "sidecar"]


def test_merging_replaces_lists_without_names() -> None:
    merged = pod_template.merge({"a": [1, 2], "b": {"c": 1}}, {"a": [3], "b": {"d": 2}})
    assert merged == {"a": [3], "b": {"c": 1, "d": 2}}
    assert PodTemplate().spec == {}


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
MATCH = {"key": "metadata.name", "operator": "In", "values": ["n7"]}


def gated(affinity: dict | None, gates: tuple[str, ...] = (PLACEMENT_GATE,)) -> PodFacts:
    return PodFacts("p", "g", "j", "master", 0, START, gates=gates, affinity=affinity)


@pytest.mark.parametrize(
    "affinity",
    [
        None,
        {"podAntiAffinity": {}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        {
            "nodeAffinity": {
                REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}
            }
        },
        {
            "nodeAffinity": {
                REQUIRED: {"nodeSelectorTerms": [{"matchFields": [{"key": "x"}]}, {"matchExpressions": []}]}
            }
        },
    ],
)
def test_pin_patch_leaves_one_node_for_any_affinity(affinity: dict | None) -> None:
    pod = gated(affinity)
    document = {"spec": {"schedulingGates": [{"name": PLACEMENT_GATE}]}}
    if affinity is not None:
        document["spec"]["affinity"] = copy.deepcopy(affinity)
    for operation in scheduling.pin_patch(pod, "n7"):
        apply(document, operation)
    assert document["spec"]["schedulingGates"] == []
    terms = document["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert all(MATCH in term["matchFields"] for term in terms), "a node may fulfil any one of the terms"
    assert scheduling.pinned_node(document["spec"]["affinity"]) == "n7"
    for key, value in (affinity or {}).items():
        if key != "nodeAffinity":
            assert document["spec"]["affinity"][key] == value


def test_pin_patch_removes_only_our_gate() -> None:
    patch = scheduling.pin_patch(gated(None, gates=("other/gate", PLACEMENT_GATE)), "n7")
    assert patch[0] == {"op": "test", "path": "/spec/schedulingGates/1", "value": {"name": PLACEMENT_GATE}}
    assert patch[-1] == {"op": "remove", "path": "/spec/schedulingGates/1"}


def apply(document: dict, operation: dict) -> None:
    """Apply a JSON patch operation (RFC 6902), as far as it is used here."""
    *parents, last = operation["path"].strip("/").split("/")
    place = document
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if operation["op"] == "test":
        assert (place[int(last)] if isinstance(place, list) else place[last]) == operation["value"]
    elif operation["op"] == "remove":
        del place[int(last)]
    elif isinstance(place, list):
        place.append(operation["value"])
    else:
        place[last] = operation["value"]
