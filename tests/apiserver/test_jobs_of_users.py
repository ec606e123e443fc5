"""Jobs with commands of the user's are valid by the definitions of PyTorchJob and JobSet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flow_harm import running
from flow_world import World, node, spec_of
from real_api_server import job_set_definition, pytorch_job_definition

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow import actions as a

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
