"""Gang pods as Kubeflow's and JobSet's controllers make them pass the Pod Security Standard `restricted`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from flow_jobs import pods_of_job
from flow_world import World, spec_of

from trainwright_operator.api.installation import InstallationRules, PodTemplateRule
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.actions import CreateJob

ROOT = Path(__file__).resolve().parents[2]
INIT_CONTAINER = ROOT / "deploy/local-cluster/addons/init-container.yaml"
JOB = {"image": "lab/train:7", "command": ["bash", "/etc/trainwright/launch.sh"]}
SIDECAR = {"name": "logs", "image": "logs:1"}
SECURED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
OF_NAMESPACE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [
            {"name": "key", "secret": {"secretName": "key"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c4"}},
            {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        ],
        "containers": [SIDECAR | {"securityContext": SECURED}],
    },
}


@pytest.fixture
def restricted(api_server, namespace) -> str:
    """Return the test's namespace, which admits only what the standard allows."""
    api_server.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return str(namespace)


def manifests(**changes: Any) -> list[dict[str, Any]]:
    """Return the objects of all gangs of a plan, and of the job that it hands over."""
    trials = {"topK": 1, "baseline": "None", "framework": JOB | {"stepTimeRegex": "took"}}
    world = World(
        spec=spec_of(**{"trials": trials, "apply": "Run", "job": JOB} | changes),
        log=lambda order: "took 1 s\n" * 20 if order.kind == "trial" else None,
        rules=InstallationRules(pod_template=PodTemplateRule.NAMESPACE),
    )
    found: list[dict[str, Any]] = []
    while world.succeeded == "Unknown":
        found += [dict(one.manifest) for one in world.step() if isinstance(one, CreateJob)]
    assert world.handed_over
    return json.loads(json.dumps([*found, *world.handed_over.values()]))  # type: ignore[no-any-return]


def pods(namespace: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods that the controllers make of an object."""
    made = []
    for pod, template in pods_of_job(job):
        meta = template["metadata"] | {"name": pod["name"], "namespace": namespace}
        meta["labels"] = meta["labels"] | pod["labels"]
        made.append({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
    return made


@pytest.mark.parametrize("launcher", LauncherKind)
@pytest.mark.parametrize("template", [{}, OF_NAMESPACE], ids=["own", "Namespace"])
def test_pods_of_gangs_and_of_the_handed_over_job_are_admitted(
    api_server, restricted, launcher: LauncherKind, template: dict[str, Any]
) -> None:
    jobs = manifests(launcher=launcher, worker={"podTemplate": template}, job=JOB | {"podTemplate": template})
    made = [pod for job in jobs for pod in pods(restricted, job)]
    assert {pod["spec"]["containers"][0]["image"] for pod in made} == {"worker:1", JOB["image"]}
    api_server.kubectl("create", "--dry-run=server", document=made)


def test_kubeflows_own_init_container_is_not_admitted_and_the_documented_one_is(api_server, restricted) -> None:
    links = next(job for job in manifests(launcher="PyTorchJob") if job["metadata"]["name"].endswith("-links"))
    worker = next(pod for pod in pods(restricted, links) if pod["metadata"]["name"].endswith("-worker-0"))
    # Kubeflow's default template sets image, command and resources, and no security context.
    worker["spec"]["initContainers"] = [{"name": "init-pytorch", "image": "alpine:3.10", "command": ["sh"]}]
    refusal = api_server.refusal(worker)
    assert 'violates PodSecurity "restricted' in refusal
    assert 'container "init-pytorch" must set securityContext.allowPrivilegeEscalation=false' in refusal
    assert '"pytorch"' not in refusal, "the worker's own container is not what is refused"
    text = INIT_CONTAINER.read_text()
    for name, value in {"InitContainerImage": "alpine:3.10", "MaxTries": "100", "MasterAddr": "master"}.items():
        text = text.replace("{{.%s}}" % name, value)  # noqa: UP031 - braces
    worker["spec"]["initContainers"] = yaml.safe_load(text)
    api_server.kubectl("create", "--dry-run=server", document=worker)
