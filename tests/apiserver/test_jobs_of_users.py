"""Jobs with commands of the user's are valid by the definitions of PyTorchJob and JobSet."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from flow_harm import running
from flow_world import World, node, spec_of
from real_api_server import job_set_definition, pytorch_job_definition

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow import actions as a
from trainwright_operator.kube.client import ApiError

JOB = {"image": "lab/train:7", "command": ["bash", "/etc/trainwright/launch.sh"]}


@pytest.fixture(scope="module")
def api_server_with_jobs(api_server) -> Any:
    """Return the API server with the definitions of PyTorchJob and JobSet."""
    api_server.kubectl("apply", "--server-side", document=[pytorch_job_definition(), job_set_definition()])
    for kind in ("pytorchjobs.kubeflow.org", "jobsets.jobset.x-k8s.io"):
        api_server.kubectl("wait", "--for=condition=Established", f"customresourcedefinition/{kind}", "--timeout=30s")
    return api_server


def manifests(launcher: LauncherKind, apply: str) -> list[dict[str, Any]]:
    """Return the jobs of a trial in the user's framework, and the winner's."""
    world = World(
        nodes=(node("n1", devices=2), node("n2", devices=1)),
        log=lambda order: "took 1 s\n" * 20 if order.kind == "trial" else None,
        spec=spec_of(
            launcher=launcher,
            search={"planner": "Megatron", "limits": {"maxTensorDegree": 1}},
            trials={"topK": 1, "baseline": "None", "framework": JOB | {"stepTimeRegex": "took"}},
            apply=apply,
            job=JOB,
        ),
    )
    trials = []
    while not running(world, "candidate-1"):
        todo = world.step()
        trials += [one.manifest for one in todo if isinstance(one, a.CreateJob) and "candidate-1" in str(one.manifest)]
    world.run()
    assert trials
    assert world.handed_over
    return [json.loads(json.dumps(one)) for one in (*trials, *world.handed_over.values())]


@pytest.mark.parametrize("apply", ["Run", "Suspended"])
@pytest.mark.parametrize("launcher", LauncherKind)
def test_definition_admits_jobs_without_unknown_fields(
    api_server_with_jobs, namespace, launcher: LauncherKind, apply: str
) -> None:
    for manifest in manifests(launcher, apply):
        manifest["metadata"]["namespace"] = namespace
        manifest["metadata"].pop("ownerReferences", None)
        api_server_with_jobs.kubectl("create", "--validate=strict", "--namespace", namespace, document=manifest)
    jobs = api_server_with_jobs.get(launcher, "--namespace", namespace)["items"]
    users = [one for one in jobs if "trainwright.dev/handed-over-by" in one["metadata"]["labels"]]
    suspended = [one["spec"].get("suspend") or one["spec"].get("runPolicy", {}).get("suspend", False) for one in users]
    assert suspended == [apply == "Suspended"] * len(users)


def policy(namespace: str) -> list[dict[str, Any]]:
    """Return a cluster policy that refuses the jobs of a namespace."""
    rule = {"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["pytorchjobs", "jobsets"]}
    place = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": f"no-jobs-{namespace}"}}
    validation = {"expression": "false", "message": "no jobs here"}
    spec = {"matchConstraints": {"resourceRules": [rule], **place}, "validations": [validation]}
    binding = {"policyName": head["metadata"]["name"], "validationActions": ["Deny"]}
    return [
        head | {"kind": "ValidatingAdmissionPolicy", "spec": spec},
        head | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    ]


def test_refusal_by_a_cluster_policy_is_known_by_its_words(api_server_with_jobs, namespace) -> None:
    """Its code is that of an invalid object."""
    job = manifests(LauncherKind.PYTORCH_JOB, "Suspended")[0]
    job["metadata"] = {"name": "any", "namespace": namespace}
    api_server_with_jobs.kubectl("apply", document=policy(namespace))
    deadline = time.monotonic() + 30
    while (done := api_server_with_jobs.try_kubectl("create", "--dry-run=server", document=job)).returncode == 0:
        assert time.monotonic() < deadline, "the policy is not in force"
        time.sleep(0.5)
    assert "is invalid" in done.stderr
    assert "no jobs here" in done.stderr
    assert ApiError(422, done.stderr).is_forbidden
