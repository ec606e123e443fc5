"""Pod templates: what needs which `worker.allowPodTemplate`, and what a plan says that asks for more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flow_harm import running
from flow_world import World, spec_of

from trainwright import documents
from trainwright.worker_api import WorkerTask
from trainwright_operator.api.installation import InstallationRules, PodTemplateRule
from trainwright_operator.api.pods import PodTemplate
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.gangs.failures import GangFailure
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.job_creation import create_missing
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.gangs.pod_limits import find_template_excess
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import StoredConfigMap

RESTRICTED, NAMESPACE, ANY = PodTemplateRule
JOB = {"image": "lab/train:7", "command": ["train"]}
WORKER = "spec.containers[pytorch]"
SIDECAR = {"name": "logs", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}


def worker(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "pytorch", **fields}]}


def secured(**fields: Any) -> dict[str, Any]:
    return worker(securityContext=fields)


FREE = [
    {},
    {"tolerations": [{"key": "a", "operator": "Exists"}], "terminationGracePeriodSeconds": 60, "hostNetwork": False},
    worker(env=[{"name": "A", "value": "b"}], resources={"limits": {"memory": "8Gi"}}, volumeMounts=[]),
    worker(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}]),
    {"volumes": [{"name": "model", "configMap": {"name": "encoder"}}, {"name": "scratch", "emptyDir": {}}]},
    {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}},
    secured(runAsUser=7, readOnlyRootFilesystem=True, privileged=False, capabilities={"add": ["NET_BIND_SERVICE"]}),
    secured(appArmorProfile={"type": "RuntimeDefault"}),
    {"containers": [SIDECAR], "initContainers": [SIDECAR | {"name": "first"}]},
]
OF_NAMESPACE = {
    "spec.serviceAccountName": {"serviceAccountName": "trainer"},
    "spec.imagePullSecrets": {"imagePullSecrets": [{"name": "registry"}]},
    "spec.priorityClassName": {"priorityClassName": "high"},
    "spec.volumes[key].secret": {"volumes": [{"name": "key", "secret": {"secretName": "key"}}]},
    "spec.volumes[data].persistentVolumeClaim": {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c4"}}]
    },
    "spec.volumes[token].projected": {"volumes": [{"name": "token", "projected": {"sources": []}}]},
    f"{WORKER}.env[KEY].valueFrom.secretKeyRef": worker(
        env=[{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]
    ),
    f"{WORKER}.envFrom.secretRef": worker(envFrom=[{"secretRef": {"name": "a"}}]),
    "spec.volumes[theirs].configMap.name": {"volumes": [{"name": "theirs", "configMap": {"name": "a-links-order"}}]},
    f"{WORKER}.env[KEY].valueFrom.configMapKeyRef.name": worker(
        env=[{"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "a-links-order", "key": "secret"}}}]
    ),
    f"{WORKER}.envFrom.configMapRef.name": worker(envFrom=[{"configMapRef": {"name": "a-links-order"}}]),
}
OF_NODE = {
    "spec.hostNetwork": {"hostNetwork": True},
    "spec.hostPID": {"hostPID": True},
    "spec.hostIPC": {"hostIPC": True},
    "spec.fieldOfTomorrow": {"fieldOfTomorrow": 1},
    "spec.volumes[root].hostPath": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
    "spec.volumes[order].hostPath": {"volumes": [{"name": "order", "hostPath": {"path": "/"}}]},
    "spec.securityContext.sysctls": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    "spec.securityContext.runAsUser": {"securityContext": {"runAsUser": 0}},
    "spec.securityContext.runAsNonRoot": {"securityContext": None},
    "spec.securityContext.seccompProfile.type": {"securityContext": {"seccompProfile": None}},
    f"{WORKER}.securityContext.seccompProfile.type": secured(seccompProfile={"type": "Unconfined"}),
    f"{WORKER}.securityContext.runAsUser": secured(runAsUser=0),
    f"{WORKER}.securityContext.runAsNonRoot": secured(runAsNonRoot=False),
    f"{WORKER}.securityContext.privileged": secured(privileged=True),
    f"{WORKER}.securityContext.appArmorProfile": secured(appArmorProfile={"type": "Unconfined"}),
    f"{WORKER}.securityContext.procMount": secured(procMount="Unmasked"),
    f"{WORKER}.securityContext.allowPrivilegeEscalation": secured(allowPrivilegeEscalation=True),
    f"{WORKER}.securityContext.capabilities.add": secured(capabilities={"add": ["SYS_ADMIN"]}),
    f"{WORKER}.securityContext.capabilities.drop": secured(capabilities={"drop": []}),
    f"{WORKER}.ports.hostPort": worker(ports=[{"containerPort": 80, "hostPort": 80}]),
    f"{WORKER}.livenessProbe.httpGet.host": worker(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 1}}),
    f"{WORKER}.lifecycle.preStop.tcpSocket.host": worker(
        lifecycle={"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 1}}}
    ),
    "spec.containers[side].securityContext.allowPrivilegeEscalation": {"containers": [{"name": "side"}]},
    "spec.initContainers[side].securityContext.capabilities.drop": {
        "initContainers": [{"name": "side", "securityContext": {"allowPrivilegeEscalation": False}}]
    },
}


def excesses(template: PodTemplate) -> dict[PodTemplateRule, str]:
    """Return the field that each rule refuses, of those that refuse one."""
    found = {rule: find_template_excess(template, InstallationRules(pod_template=rule)) for rule in PodTemplateRule}
    return {rule: excess.field for rule, excess in found.items() if excess is not None}


@pytest.mark.parametrize("spec", FREE, ids=str)
def test_template_that_gives_no_more_than_the_workers_own_pod_is_free(spec) -> None:
    assert excesses(PodTemplate(spec=spec)) == {}


@pytest.mark.parametrize(("field", "spec"), OF_NAMESPACE.items())
def test_what_the_namespace_holds_needs_namespace(field: str, spec) -> None:
    assert excesses(PodTemplate(spec=spec)) == {RESTRICTED: field}


@pytest.mark.parametrize(("field", "spec"), OF_NODE.items())
def test_what_is_the_nodes_needs_any(field: str, spec) -> None:
    found = excesses(PodTemplate(spec=spec))
    assert found.keys() == {RESTRICTED, NAMESPACE}
    assert found[NAMESPACE] == field


@pytest.mark.parametrize(
    ("kind", "key", "refused"),
    [
        ("labels", "team", {RESTRICTED}),
        ("labels", "trainwright.dev/gang", {RESTRICTED}),
        ("annotations", "sidecar.istio.io/inject", {RESTRICTED}),
        ("annotations", "container.apparmor.security.beta.kubernetes.io/pytorch", {RESTRICTED, NAMESPACE}),
    ],
)
def test_labels_and_annotations_need_a_rule(kind: str, key: str, refused: set[PodTemplateRule]) -> None:
    template = PodTemplate.model_validate({"metadata": {kind: {key: "unconfined"}}})
    assert excesses(template) == dict.fromkeys(refused, f"metadata.{kind}[{key}]")


def templated(place: str, template: dict[str, Any], rule: PodTemplateRule = RESTRICTED, **changes: Any) -> World:
    """Return a world whose plan has the template in that part of the spec."""
    job = JOB | {"podTemplate": template}
    parts: dict[str, dict[str, Any]] = {
        "worker": {"worker": {"podTemplate": template}},
        "trials.framework": {"trials": {"topK": 1, "framework": job | {"stepTimeRegex": "took"}}},
        "job": {"job": job},
    }
    return World(spec=spec_of(**parts[place] | changes), rules=InstallationRules(pod_template=rule))


@pytest.mark.parametrize("place", ["worker", "trials.framework", "job"])
def test_plan_waits_without_pods_and_names_the_field_and_the_chart_value(place: str) -> None:
    world = templated(place, {"spec": {"hostNetwork": True}})
    for _ in range(3):
        world.step()
    accepted = world.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("Unknown", "PodTemplateNotAllowed")
    assert accepted.message == (
        f"spec.{place}.podTemplate.spec.hostNetwork: gives pods more than the worker's own have; remove it, or install the "
        "operator with worker.allowPodTemplate: Any"
    )
    assert not world.created


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"fooBar": 1}, "spec.fooBar: unknown field `fooBar`; remove it; or"),
        ({"hostNetwrok": True}, "spec.hostNetwrok: unknown field `hostNetwrok`; write hostNetwork; or"),
        ({"toleration": [{}]}, "spec.toleration: unknown field `toleration`; write tolerations; or"),
        ({"env": [{"name": "A"}]}, "spec.env: unknown field `env`; move it into an entry of containers; or"),
        (worker(enviroment=[1]), f"{WORKER}.enviroment: unknown field `enviroment`; remove it; or"),
        (worker(volumeMount=[1]), f"{WORKER}.volumeMount: unknown field `volumeMount`; write volumeMounts; or"),
        (
            secured(privilaged=True),
            f"{WORKER}.securityContext.privilaged: unknown field `privilaged`; write privileged",
        ),
        (
            {"volumes": [{"name": "a", "hostpath": {"path": "/"}}]},
            "spec.volumes[a].hostpath: unknown field `hostpath`; write",
        ),
    ],
)
def test_unknown_field_is_told_from_one_that_is_not_allowed(spec: dict[str, Any], words: str) -> None:
    world = templated("worker", {"spec": spec})
    world.step()
    told = world.condition("Accepted").message
    assert told.startswith(f"spec.worker.podTemplate.{words}")
    assert told.endswith("if it is of a newer Kubernetes, install the operator with worker.allowPodTemplate: Any")
    assert "gives pods more" not in told


def test_plan_goes_on_once_the_installation_allows_its_template() -> None:
    world = templated("worker", {"spec": secured(runAsUser=0)})
    world.step()
    assert "has to be another user than 0; set it, or install" in world.condition("Accepted").message
    world.rules = InstallationRules(pod_template=ANY)
    world.restart()
    assert world.run().winner is not None


def test_gang_that_runs_is_kept_when_the_installation_allows_less() -> None:
    world = templated("worker", {"spec": {"serviceAccountName": "trainer"}}, NAMESPACE)
    world.run(until=lambda: running(world, "links"))
    world.rules = InstallationRules(pod_template=RESTRICTED)
    world.restart()
    for _ in range(20):
        world.step()
    assert world.condition("Accepted").reason == "PodTemplateNotAllowed"
    assert [pod.phase for pod in world.pods.values()] == ["Succeeded"] * 3
    world.rules = InstallationRules(pod_template=NAMESPACE)
    created = len(world.created)
    assert world.run().winner is not None
    assert "links" not in "".join(world.created[created:]).replace("links-result", "")


def stored(world: World, role: StoredRole, gang: str) -> StoredConfigMap:
    """Run passes until there is such a ConfigMap."""
    while True:
        found = [one for one in world.stored.values() if (one.role, one.gang) == (role, gang)]
        if found:
            return found[0]
        world.step()


@pytest.mark.parametrize("launcher", LauncherKind)
def test_modified_record_of_a_handed_over_job_creates_nothing(launcher: LauncherKind) -> None:
    world = World(spec=spec_of(apply="Run", job=JOB, launcher=launcher))
    record = stored(world, StoredRole.HANDOVER, "")
    text = record.data["manifests.json"].replace('"enableServiceLinks": false', '"hostPID": true')
    assert "hostPID" in text
    world.stored[record.name] = replace(record, data={**record.data, "manifests.json": text})
    world.run()
    message = world.condition("Succeeded").message
    assert "template.spec.hostPID: gives pods more than the worker's own have; remove it, or install" in message
    assert "delete that ConfigMap, then edit the spec to have it made anew" in message
    assert not world.handed_over


def test_modified_job_of_a_gang_creates_nothing() -> None:
    world = World(spec=spec_of(trials={"topK": 1, "baseline": "None", "framework": JOB | {"stepTimeRegex": "took"}}))
    task_map = stored(world, StoredRole.TASK, "candidate-1")
    task = documents.loads(task_map.data["order.json"], WorkerTask)
    context = ReconcileContext(world.snapshot(), world.now)

    def created(template: PodTemplate) -> object:
        asked = world.spec.trials.framework
        assert asked is not None
        framework = asked.model_copy(update={"pod_template": template})
        gang_spec = GangSpec("candidate-1", task, 60.0, 60.0, framework=framework)
        return create_missing(context, gang_spec, task_map, LAUNCHERS[LauncherKind.PYTORCH_JOB], ())

    refused = created(PodTemplate(spec={"hostPID": True}))
    assert isinstance(refused, GangFailure)
    assert f"{task_map.name}.spec.hostPID: gives pods more" in refused.message
    assert isinstance(created(PodTemplate()), tuple)


@pytest.mark.parametrize("isolates", [True, False])
def test_gang_is_reached_by_its_own_pods_alone_unless_the_installation_says_otherwise(isolates: bool) -> None:
    world = World(rules=InstallationRules(isolates_gangs=isolates))
    world.run(until=lambda: running(world, "links"))
    assert len(world.policies) == isolates  # the simulated cluster checks that pods never come before it
    for policy in world.policies.values():
        own = {"podSelector": {"matchLabels": {"trainwright.dev/plan-uid": "uid-1", "trainwright.dev/gang": "links"}}}
        assert policy["spec"] == own | {"policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    world.run()
    assert not world.policies
