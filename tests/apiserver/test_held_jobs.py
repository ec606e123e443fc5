"""Plan's own job on a real API server, by the operator's rights alone; a tenant with rights on plans alone frees its devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from flow_handover import RUN
from flow_jobs import pods_of_job
from flow_world import World, spec_of
from operator_process import NODES, operator, until

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.names import handover_name
from trainwright_operator.flow.snapshot import Snapshot
from trainwright_operator.kube import apply
from trainwright_operator.node_resource import node_facts


@dataclass
class PlanWorld(World):
    """World of a plan that the API server has."""

    resource: dict[str, Any] | None = None

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        assert self.resource is not None
        meta = self.resource["metadata"]
        names = {key: meta[key] for key in ("name", "namespace", "uid")}
        return replace(found, plan=replace(found.plan, **names))


def owner(manifest: dict[str, Any]) -> dict[str, Any]:
    (found,) = manifest["metadata"]["ownerReferences"]
    return dict(found)


@pytest.fixture
def measured(equipped_api_server, namespace, helm_template, request) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Create a plan whose trials were measured, and whose winner is about to be handed over; and the chart's roles."""
    api, launcher = equipped_api_server, request.param
    settings = ("--set", f"watchNamespaces={{{namespace}}}", "--set", f"fullnameOverride={namespace}")
    rendered = yaml.safe_load_all(helm_template("--namespace", namespace, *settings).stdout)
    api.kubectl("apply", document=[one for one in rendered if "Role" in one["kind"] or one["kind"] == "ServiceAccount"])
    spec = json.loads(spec_of(**RUN, launcher=launcher).model_dump_json(by_alias=True, exclude_none=True))
    head = {"apiVersion": "trainwright.dev/v1alpha1", "kind": "TrainingPlan"}
    created = api.create(head | {"metadata": {"name": "demo", "namespace": namespace}, "spec": spec})
    nodes = tuple(node_facts(one) for one in api.get("nodes")["items"] if one["metadata"]["name"] in NODES)
    world = PlanWorld(spec=spec_of(**RUN, launcher=launcher), nodes=nodes, image="worker:test", resource=created)
    while not any(isinstance(one, a.CreateConfigMap) and one.role is StoredRole.HANDOVER for one in world.decide()):
        world.step()
    plan = world.snapshot().plan
    for one in world.stored.values():
        if one.role in (StoredRole.RESULT, StoredRole.DOCUMENT):
            made = a.CreateConfigMap(one.name, StoredRole(one.role), one.data, gang=one.gang)
            body = apply.config_map(plan, made)
            body["metadata"]["annotations"] = dict(one.annotations)
            api.create(body)
    patch = json.dumps({"status": world.status.dump()})
    api.kubectl(
        "patch", "trainingplan", "demo", "--namespace", namespace, "--subresource=status", "--type=merge", "-p", patch
    )
    user = f"tenant-{namespace}"
    role = ("rolebinding", user, f"--clusterrole={namespace}-editor", f"--user={user}")
    api.kubectl("create", *role, "--namespace", namespace)
    yield api, user, created
    api.kubectl("delete", "pods", "--all", "--namespace", namespace, "--force", "--grace-period=0")


def kubeconfig_of_operator(api: Any, namespace: str, folder: Path) -> Path:
    configuration = json.loads(api.kubeconfig.read_text())
    configuration["users"][0]["user"] = {
        "token": api.kubectl("create", "token", namespace, "--namespace", namespace).strip()
    }
    found = folder / "operator.kubeconfig"
    found.write_text(json.dumps(configuration))
    return found


def bound_pods(api: Any, namespace: str, job: dict[str, Any]) -> None:
    """Create the pods of a job, each bound to its node."""
    for pod, template in pods_of_job(job):
        spec = json.loads(json.dumps(template["spec"]))
        term = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][
            0
        ]
        spec["nodeName"] = term["matchFields"][0]["values"][0]
        of = {"apiVersion": job["apiVersion"], "kind": job["kind"], "controller": True}
        of |= {key: job["metadata"][key] for key in ("name", "uid")}
        if job["kind"] == "JobSet":
            role = pod["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]
            of |= {"apiVersion": "batch/v1", "kind": "Job", "name": f"{of['name']}-{role}-0", "uid": "of-the-job"}
        meta = {"name": pod["name"], "namespace": namespace, "ownerReferences": [of]}
        labels = template["metadata"]["labels"] | pod["labels"]
        api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta | {"labels": labels}, "spec": spec})


@pytest.mark.parametrize("measured", LauncherKind, indirect=True)
def test_tenant_with_rights_on_plans_alone_gives_the_devices_of_a_job_back(
    measured, namespace, tmp_path, monkeypatch
) -> None:
    api, user, created = measured
    kind = created["spec"]["launcher"]
    monkeypatch.setenv("TRAINWRIGHT_HANDOVER", "Owned")
    monkeypatch.setenv("TRAINWRIGHT_HANDOVER_MAX_HOURS", "8")

    def status() -> dict[str, Any]:
        found: dict[str, Any] = api.get("trainingplan", "demo", "--namespace", namespace).get("status", {})
        return found

    def jobs() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = api.get(kind, "--namespace", namespace)["items"]
        return found

    def edit(patch: dict[str, Any]) -> None:
        as_tenant = ("--as", user, "--namespace", namespace, "--type=merge")
        api.kubectl("patch", "trainingplan", "demo", *as_tenant, "--patch", json.dumps({"spec": patch}))

    with operator(api, namespace, tmp_path, kubeconfig=kubeconfig_of_operator(api, namespace, tmp_path)) as (_, _, log):
        held = until("a job that the plan holds", 60, lambda: status().get("heldJob"))
        assert (held["kind"], held["state"]) == (kind, "Pending"), log.read_text()
        record = api.get("configmap", status()["job"]["configMap"], "--namespace", namespace)
        for one in (*jobs(), record):
            expected = {"kind": "TrainingPlan", "name": "demo", "uid": created["metadata"]["uid"], "controller": True}
            assert expected.items() <= owner(one).items()
            assert owner(one)["apiVersion"] == created["apiVersion"]
        for one in jobs():
            bound_pods(api, namespace, one)
        held = until("devices", 60, lambda: found if (found := status()["heldJob"])["devices"] == 4 else None)
        assert (held["state"], held["text"]) == ("Running", "Running, 4 devices")
        assert "endsAt" in held
        table = api.kubectl("get", "trainingplans", "--namespace", namespace, "--as", user)
        assert "JOB" in table.splitlines()[0]
        assert "Running, 4 devices" in table

        refused = api.try_kubectl("delete", kind, "--all", "--namespace", namespace, "--as", user)
        assert "cannot" in refused.stderr, "the tenant has rights on jobs, so nothing is shown"
        edit({"apply": "Never"})
        until("the job to be gone", 60, lambda: not jobs())
        until("the status to say so", 60, lambda: "heldJob" not in status() and "job" not in status())
        gone = api.try_kubectl("get", "configmap", record["metadata"]["name"], "--namespace", namespace)
        assert "NotFound" in gone.stderr
        api.kubectl("delete", "pods", "--all", "--namespace", namespace, "--force", "--grace-period=0")

        edit({"apply": "Suspended"})
        held = until("another job", 60, lambda: status().get("heldJob"))
        assert held["state"] == "Suspended"
        edit({"suspend": True})
        until("the other job to be gone", 60, lambda: not jobs() and "heldJob" not in status())
        edit({"suspend": False})
        until("it to be there again", 60, jobs)
    events = api.get("events", "--namespace", namespace)["items"]
    told = [(one["reason"], one["message"]) for one in events if one["reason"].startswith("Job")]
    assert any(reason == "JobHandedOver" and "this plan's own" in words for reason, words in told), told
    for why in ("spec.apply is Never", "spec.suspend is true"):
        assert any(reason == "JobEnded" and why in words for reason, words in told), told


@pytest.mark.parametrize("measured", [LauncherKind.JOB_SET], indirect=True)
def test_job_of_the_users_of_that_name_is_left_alone(measured, namespace, tmp_path, monkeypatch) -> None:
    """Whoever owns a job of the name that the plan's own would have: the plan waits, and names it."""
    api, _, created = measured
    world = World(spec=spec_of(**RUN, launcher="JobSet"))
    world.run()
    (manifest,) = world.handed_over.values()
    name = handover_name("demo", created["metadata"]["uid"])
    manifest = json.loads(json.dumps(manifest))
    manifest["metadata"] |= {"name": name, "namespace": namespace}
    manifest["metadata"]["annotations"] = {"trainwright.dev/plan-uid": created["metadata"]["uid"]}
    api.create(manifest)
    monkeypatch.setenv("TRAINWRIGHT_HANDOVER", "Owned")
    with operator(api, namespace, tmp_path, kubeconfig=kubeconfig_of_operator(api, namespace, tmp_path)):
        words = until("the refusal", 60, lambda: refusal(api, namespace))
    assert f'"{name}" already exists' in words
    (job,) = api.get("jobsets", "--namespace", namespace)["items"]
    assert "ownerReferences" not in job["metadata"]


def refusal(api: Any, namespace: str) -> str:
    conditions = api.get("trainingplan", "demo", "--namespace", namespace)["status"]["conditions"]
    message: str = next(one["message"] for one in conditions if one["type"] == "Succeeded")
    return message if "already exists" in message else ""
