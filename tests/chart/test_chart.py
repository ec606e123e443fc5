"""The Helm chart: what it installs, what it refuses, and how little the operator may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "manifests" / "trainwright.yaml"
EVERYWHERE: tuple[str, ...] = ()
NAMED = ("--set", "watchNamespaces={team-a,team-b}")
FORBIDDEN_RESOURCES = {
    "secrets",
    "pods/exec",
    "pods/attach",
    "pods/portforward",
    "serviceaccounts/token",
    "nodes/proxy",
}
FORBIDDEN_VERBS = {"*", "escalate", "bind", "impersonate", "deletecollection"}
READ = {"get", "list", "watch"}


@pytest.fixture
def rendered(helm_template):
    """The documents of the chart with these arguments."""

    def render(*arguments: str, kube_version: str = "1.34.0") -> list[dict[str, Any]]:
        done = helm_template(*arguments, kube_version=kube_version)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return render


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of_kind(documents, "Deployment")
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def operator_rules(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rules of every role that the operator's service account is bound to."""
    bound = {
        (binding["roleRef"]["kind"], binding["roleRef"]["name"])
        for binding in documents
        if binding["kind"].endswith("RoleBinding") and binding["subjects"][0]["kind"] == "ServiceAccount"
    }
    roles = [role for role in documents if (role["kind"], role["metadata"]["name"]) in bound]
    assert {(role["kind"], role["metadata"]["name"]) for role in roles} == bound
    return [rule for role in roles for rule in role["rules"]]


def test_the_plain_manifests_are_the_rendered_chart(helm_template) -> None:
    head, _, body = MANIFESTS.read_text().partition("---\n")
    assert yaml.safe_load(head)["kind"] == "Namespace"
    assert "---\n" + body == helm_template().stdout, "run `make generate`"


@pytest.mark.parametrize("settings", [EVERYWHERE, NAMED], ids=["everywhere", "named namespaces"])
def test_no_right_goes_further_than_needed(rendered, settings) -> None:
    documents = rendered(*settings)
    for role in [*of_kind(documents, "ClusterRole"), *of_kind(documents, "Role")]:
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"], rule
            assert "rbac.authorization.k8s.io" not in rule["apiGroups"], rule
            assert not FORBIDDEN_RESOURCES & set(rule["resources"]), rule
    for rule in operator_rules(documents):
        assert not FORBIDDEN_VERBS & set(rule["verbs"]), rule
        if {"nodes", "namespaces", "customresourcedefinitions", "resourceslices"} & set(rule["resources"]):
            assert set(rule["verbs"]) <= READ, rule


def test_with_named_namespaces_the_cluster_is_only_read(rendered) -> None:
    documents = rendered(*NAMED)
    (cluster_role,) = [role for role in of_kind(documents, "ClusterRole") if role["metadata"]["name"] == "trainwright"]
    for rule in cluster_role["rules"]:
        assert set(rule["resources"]) <= {"nodes", "namespaces", "customresourcedefinitions", "resourceslices"}
        assert set(rule["verbs"]) <= READ
    (of_namespaces,) = [rule for rule in cluster_role["rules"] if "namespaces" in rule["resources"]]
    assert of_namespaces["verbs"] == ["list", "watch"], "by these kopf learns that one was deleted or has come back"
    assert not any("namespaces" in rule["resources"] for rule in operator_rules(rendered()))
    namespaces = {role["metadata"]["namespace"] for role in of_kind(documents, "Role")}
    assert namespaces == {"team-a", "team-b", "trainwright-system"}
    environment = {variable["name"]: variable.get("value") for variable in container(documents)["env"]}
    assert environment["TRAINWRIGHT_WATCH_NAMESPACES"] == "team-a,team-b"


def test_the_operator_runs_with_as_little_as_it_can(rendered) -> None:
    documents = rendered()
    (deployment,) = of_kind(documents, "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    only = container(documents)
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(only["resources"]) == {"requests", "limits"}
    assert [volume["name"] for volume in pod["volumes"]] == ["tmp"]
    (account,) = of_kind(documents, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert "Secret" not in {document["kind"] for document in documents}


def test_images_come_from_the_values(rendered) -> None:
    def image(*settings: str) -> str:
        return str(container(rendered(*settings))["image"])

    assert image() == "trainwright/operator:0.1.0"
    assert image("--set", "image.repository=registry.example:5000/op,image.tag=v2") == "registry.example:5000/op:v2"
    digest = f"sha256:{'a' * 64}"
    assert image("--set", f"image.tag=v2,image.digest={digest}") == f"trainwright/operator@{digest}"
    environment = container(rendered("--set", "worker.image=registry.example/w:3"))["env"]
    assert {"name": "TRAINWRIGHT_WORKER_IMAGE", "value": "registry.example/w:3"} in environment
    assert {"name": "TRAINWRIGHT_WORKER_IMAGE", "value": "trainwright/worker:0.1.0"} in container(rendered())["env"]


def test_the_service_reaches_the_metrics(rendered) -> None:
    documents = rendered()
    (service,) = of_kind(documents, "Service")
    assert service["metadata"]["name"] == "trainwright-metrics"
    (port,) = service["spec"]["ports"]
    assert (port["name"], port["port"]) == ("metrics", 9090)
    assert {"name": port["targetPort"], "containerPort": 9090} in container(documents)["ports"]
    (deployment,) = of_kind(documents, "Deployment")
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_the_definition_can_be_left_out_and_is_kept_by_default(rendered) -> None:
    (definition,) = of_kind(rendered(), "CustomResourceDefinition")
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    committed = yaml.safe_load((ROOT / "charts/trainwright/files/trainingplans.yaml").read_text())
    assert definition["spec"] == committed["spec"]
    (definition,) = of_kind(rendered("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in definition["metadata"]
    assert not of_kind(rendered("--set", "crds.enabled=false"), "CustomResourceDefinition")


def test_a_service_monitor_needs_the_prometheus_operator(helm_template, rendered) -> None:
    wanted = ("--set", "metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.labels.release=prometheus")
    done = helm_template(*wanted)
    assert done.returncode != 0
    assert "install the Prometheus operator first, or set metrics.serviceMonitor.enabled=false" in done.stderr
    (monitor,) = of_kind(rendered(*wanted, "--api-versions", "monitoring.coreos.com/v1"), "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (service,) = of_kind(rendered(), "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("workers.image=a", "workers"),
        ("image.digest=sha256:abc", "digest"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("metrics.serviceMonitor.interval=often", "interval"),
        ("imagePullSecrets={name}", "imagePullSecrets"),
    ],
)
def test_values_that_mean_nothing_are_refused(helm_template, setting, complaint) -> None:
    done = helm_template("--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_a_cluster_without_scheduling_gates_is_refused(helm_template) -> None:
    assert helm_template(kube_version="1.30.0").returncode == 0
    done = helm_template(kube_version="1.29.9")
    assert done.returncode != 0
    assert "kubeVersion: >=1.30.0-0" in done.stderr


def test_every_value_is_described_and_every_default_passes_the_schema(helm_template) -> None:
    lines = (ROOT / "charts/trainwright/values.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        is_value = line.strip() and not line.lstrip().startswith("#") and ":" in line and not line.endswith(":")
        if is_value and line.split(":")[0].strip() not in ("requests", "limits"):
            assert lines[number - 1].lstrip().startswith("#"), f"line {number + 1} has no `# --` comment: {line}"
    assert helm_template().returncode == 0


def test_nodes_and_annotations_of_the_pod_can_be_chosen(rendered) -> None:
    documents = rendered(
        *("--set", "nodeSelector.pool=system,podAnnotations.note=x,priorityClassName=high"),
        *("--set", "tolerations[0].operator=Exists,imagePullSecrets[0].name=registry"),
        *("--set-json", 'affinity={"nodeAffinity":{}}'),
    )
    (deployment,) = of_kind(documents, "Deployment")
    template = deployment["spec"]["template"]
    assert template["metadata"]["annotations"] == {"note": "x"}
    assert template["spec"]["nodeSelector"] == {"pool": "system"}
    assert template["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert template["spec"]["affinity"] == {"nodeAffinity": {}}
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert template["spec"]["priorityClassName"] == "high"
