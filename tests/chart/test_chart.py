"""The Helm chart: what it installs, what it refuses, and how little the operator may do."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright_operator.api.installation import Handover, HandoverRule, PodTemplateRule, TenantLimits
from trainwright_operator.kube.namespace_claims import CLAIM_NAME
from trainwright_operator.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
MANIFESTS = ROOT / "deploy" / "manifests" / "trainwright.yaml"
EVERYWHERE = ("--set", "watchNamespaces={*}")
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


@pytest.fixture(scope="session")
def rendered(helm_template):
    """Return a function that renders the chart to documents, once for the same values."""

    @cache
    def render(*arguments: str, kube_version: str = "1.34.0") -> list[dict[str, Any]]:
        done = helm_template(*arguments, kube_version=kube_version)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]

    return render


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of_kind(documents, "Deployment")
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def environment(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container(documents)["env"]}


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
    assert "---\n" + body == helm_template(*EVERYWHERE).stdout, "run `make generate`"


@pytest.mark.parametrize("settings", [EVERYWHERE, NAMED], ids=["everywhere", "named namespaces"])
def test_rights_are_minimal(rendered, settings) -> None:
    documents = rendered(*settings)
    for role in [*of_kind(documents, "ClusterRole"), *of_kind(documents, "Role")]:
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"], rule
            assert "rbac.authorization.k8s.io" not in rule["apiGroups"], rule
            assert not FORBIDDEN_RESOURCES & set(rule["resources"]), rule
    for rule in operator_rules(documents):
        assert not FORBIDDEN_VERBS & set(rule["verbs"]), rule
        read_only = {
            "nodes",
            "namespaces",
            "customresourcedefinitions",
            "resourceslices",
            "deviceclasses",
            "resourceclaims",
        }
        if read_only & set(rule["resources"]):
            assert set(rule["verbs"]) <= READ, rule


CLUSTER_WIDE = {
    "nodes",
    "namespaces",
    "customresourcedefinitions",
    "resourceslices",
    "deviceclasses",
    "clusterqueues",
    "resourceflavors",
    "topologies",
}


def test_with_named_namespaces_the_cluster_is_only_read(rendered) -> None:
    documents = rendered(*NAMED)
    (cluster_role,) = [role for role in of_kind(documents, "ClusterRole") if role["metadata"]["name"] == "trainwright"]
    for rule in cluster_role["rules"]:
        assert set(rule["resources"]) <= CLUSTER_WIDE
        assert set(rule["verbs"]) <= READ
    (of_namespaces,) = [rule for rule in cluster_role["rules"] if "namespaces" in rule["resources"]]
    assert of_namespaces["verbs"] == ["list", "watch"], "by these kopf learns that one was deleted or has come back"
    assert not any("namespaces" in rule["resources"] for rule in operator_rules(rendered(*EVERYWHERE)))
    namespaces = {role["metadata"]["namespace"] for role in of_kind(documents, "Role")}
    assert namespaces == {"team-a", "team-b", "trainwright-system"}
    assert environment(documents)["TRAINWRIGHT_WATCH_NAMESPACES"] == "team-a,team-b"


def test_pods_of_other_namespaces_are_listed_only_when_enabled(rendered) -> None:
    all_pods = ("--set", "rbac.allPods=true")
    usual = operator_rules(rendered(*NAMED))
    added = [rule for rule in operator_rules(rendered(*NAMED, *all_pods)) if rule not in usual]
    assert added == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    claims = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["list"]}
    cluster_roles = [of_kind(rendered(*NAMED, *more), "ClusterRole")[0]["rules"] for more in ((), all_pods)]
    assert [claims in rules for rules in cluster_roles] == [False, True], "it is also among the rules of namespaces"
    assert rendered(*EVERYWHERE, *all_pods) == rendered(*EVERYWHERE)


def test_new_release_watches_its_own_namespace_and_has_no_rights_elsewhere(rendered) -> None:
    documents = rendered()
    assert environment(documents)["TRAINWRIGHT_WATCH_NAMESPACES"] == "trainwright-system"
    assert {role["metadata"]["namespace"] for role in of_kind(documents, "Role")} == {"trainwright-system"}
    assert environment(rendered(*EVERYWHERE))["TRAINWRIGHT_WATCH_NAMESPACES"] == ""


def test_gangs_are_isolated_and_templates_restricted_unless_the_values_say_otherwise(rendered) -> None:
    def rules(*settings: str) -> list[dict[str, Any]]:
        return [rule for rule in operator_rules(rendered(*settings)) if "networkpolicies" in rule["resources"]]

    usual = environment(rendered())
    assert (usual["TRAINWRIGHT_NETWORK_POLICY"], usual["TRAINWRIGHT_ALLOW_POD_TEMPLATE"]) == ("true", "Restricted")
    assert [rule["verbs"] for rule in rules()] == [["create"]]
    chosen = ("--set", "worker.networkPolicy=false,worker.allowPodTemplate=Any")
    other = environment(rendered(*chosen))
    assert (other["TRAINWRIGHT_NETWORK_POLICY"], other["TRAINWRIGHT_ALLOW_POD_TEMPLATE"]) == ("false", "Any")
    assert rules(*chosen) == []


LIMITS = {
    "maxPriority": "TRAINWRIGHT_MAX_PRIORITY",
    "plansPerNamespace": "TRAINWRIGHT_PLANS_PER_NAMESPACE",
    "maxTerminationGracePeriodSeconds": "TRAINWRIGHT_MAX_GRACE_SECONDS",
}


def test_limits_of_tenants_are_set_only_where_a_value_says_so(rendered) -> None:
    assert not set(LIMITS.values()) & environment(rendered()).keys()
    assert not set(LIMITS.values()) & environment(rendered("--set", "limits=null")).keys()
    for name, variable in LIMITS.items():
        found = environment(rendered("--set", f"limits.{name}=1000000000"))
        assert {variable: found[variable] for variable in LIMITS.values() if variable in found} == {
            variable: "1000000000"
        }
        assert Settings.from_environment({variable: found[variable]}).rules.limits != TenantLimits()
    assert environment(rendered("--set", "limits.maxPriority=0"))["TRAINWRIGHT_MAX_PRIORITY"] == "0"


def test_values_of_the_page_on_shared_clusters_set_what_it_says(rendered, tmp_path: Path) -> None:
    page = (ROOT / "docs/shared-clusters.md").read_text()
    values = tmp_path / "values.yaml"
    values.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    found = environment(rendered("--values", str(values)))
    settings = Settings.from_environment({name: str(value) for name, value in found.items() if value is not None})
    assert settings.namespaces == ("team-a", "team-b")
    assert settings.rules.limits == TenantLimits(priority=100, plans_per_namespace=10, grace_seconds=60)
    assert settings.rules.pod_template is PodTemplateRule.RESTRICTED
    assert settings.rules.handover == Handover(HandoverRule.OWNED, 168)
    assert settings.rules.isolates_gangs
    assert settings.rules.priority_class == "trainwright-low"
    usual, of_page = operator_rules(rendered(*NAMED)), operator_rules(rendered("--values", str(values)))
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]} in [one for one in of_page if one not in usual]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("handover=null", ("Free", "")),
        ("handover.allow=null", ("Free", "")),
        ("handover.allow=Never", ("Never", "")),
        ("handover.allow=Owned", ("Owned", "")),
        ("handover.allow=Owned,handover.maxHours=1", ("Owned", "1")),
        ("handover.allow=Owned,handover.maxHours=87600", ("Owned", "87600")),
    ],
)
def test_what_becomes_of_winners_reaches_the_operator(rendered, setting, expected) -> None:
    found = environment(rendered("--set", setting))
    assert (found["TRAINWRIGHT_HANDOVER"], found["TRAINWRIGHT_HANDOVER_MAX_HOURS"]) == expected
    given = Settings.from_environment({name: text for name, text in found.items() if text is not None}).rules.handover
    assert (given.rule.value, f"{given.max_hours:g}" if given.max_hours is not None else "") == expected


def test_operators_pod_is_reached_at_its_two_ports_alone(rendered) -> None:
    documents = rendered("--set", "networkPolicy.metricsFrom[0].podSelector.matchLabels.app=prometheus")
    (policy,) = of_kind(documents, "NetworkPolicy")
    (deployment,) = of_kind(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    health, metrics = policy["spec"]["ingress"]
    assert "from" not in health, "the kubelet asks from the node's address"
    assert metrics["from"] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    opened = {port["port"] for rule in (health, metrics) for port in rule["ports"]}
    assert opened == {port["name"] for port in container(documents)["ports"]}
    assert not of_kind(rendered("--set", "networkPolicy.enabled=false"), "NetworkPolicy")


def test_release_in_a_namespace_of_kubernetes_has_to_name_what_it_watches(helm_template) -> None:
    assert "name others" in helm_template("--namespace", "kube-system").stderr
    assert helm_template("--namespace", "kube-system", *EVERYWHERE).returncode == 0


def test_the_lease_is_named_after_the_release_and_no_other_may_be_read_or_written(rendered) -> None:
    documents = rendered("--set", "fullnameOverride=second")
    assert environment(documents)["TRAINWRIGHT_LEASE_NAME"] == "second"
    rules = [rule for rule in operator_rules(documents) if "leases" in rule["resources"]]
    named = {rule["resourceNames"][0]: rule["verbs"] for rule in rules if "resourceNames" in rule}
    assert named == {"second": ["get", "update"], CLAIM_NAME: ["get", "update"]}
    assert [rule["verbs"] for rule in rules if "resourceNames" not in rule] == [["create"]] * 2


def test_operator_pod_has_a_minimal_security_context(rendered) -> None:
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


def test_user_of_the_operator_pod_can_be_left_to_the_cluster(rendered) -> None:
    unset = ",".join(f"podSecurityContext.{field}=null" for field in ("runAsUser", "runAsGroup", "fsGroup"))
    (deployment,) = of_kind(rendered("--set", unset), "Deployment")
    assert deployment["spec"]["template"]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    documents = rendered("--set", "podSecurityContext=null,securityContext=null")
    (deployment,) = of_kind(documents, "Deployment")
    assert "securityContext" not in deployment["spec"]["template"]["spec"]
    assert "securityContext" not in container(documents)


def test_images_come_from_the_values(rendered) -> None:
    def image(*settings: str) -> str:
        return str(container(rendered(*settings))["image"])

    assert image() == f"trainwright/operator:{VERSION}"
    assert image("--set", "image.repository=registry.example:5000/op,image.tag=v2") == "registry.example:5000/op:v2"
    assert image("--set", "image.tag=1234567") == "trainwright/operator:1234567"
    assert image("--set-json", 'image={"tag": 20250102030405}') == "trainwright/operator:20250102030405"
    digest = f"sha256:{'a' * 64}"
    assert image("--set", f"image.tag=v2,image.digest={digest}") == f"trainwright/operator@{digest}"
    assert environment(rendered())["TRAINWRIGHT_WORKER_IMAGE"] == f"trainwright/worker:{VERSION}"
    chosen = rendered("--set", "worker.image=registry.example/w:3")
    assert environment(chosen)["TRAINWRIGHT_WORKER_IMAGE"] == "registry.example/w:3"


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


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("workers.image=a", "workers"),
        ("worker.allowPodTemplate=Everything", "allowPodTemplate"),
        ("handover.allow=Sometimes", "handover"),
        ("handover.allow=Owned,handover.maxHours=-1", "maxHours"),
        ("handover.allow=Owned,handover.maxHours=0", "maxHours"),
        ("handover.allow=Owned,handover.maxHours=90000", "maxHours"),
        ("handover.allow=Owned,handover.maxHours=1.5", "maxHours"),
        (
            "handover.maxHours=8",
            "only a job of a plan's own is ended, got handover.allow Free; set handover.allow=Owned",
        ),
        ("handover.hours=8", "hours"),
        ("networkPolicy.metricsFrom=a", "metricsFrom"),
        ("limits.maxPriority=-1", "maxPriority"),
        ("limits.maxPriority=1000000001", "maxPriority"),
        ("limits.maxPriority=high", "maxPriority"),
        ("limits.plansPerNamespace=0", "plansPerNamespace"),
        ("limits.plansPerNamespace=1.5", "plansPerNamespace"),
        ("limits.maxTerminationGracePeriodSeconds=4", "maxTerminationGracePeriodSeconds"),
        ("limits.maxPlans=3", "maxPlans"),
        ("watchNamespaces={team-a,kube-system}", "kube-system is a namespace of Kubernetes itself"),
        ("image.digest=sha256:abc", "digest"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("watchNamespaces={*,team-a}", "means all namespaces"),
        ("image.tag=v1 latest", "tag"),
        ("image.tag=-1", "tag"),
        ("image=null", "image"),
        ("imagePullSecrets={name}", "imagePullSecrets"),
        ("logLevel=loud", "logLevel"),
        ("logLevel=null", "logLevel"),
        ("concurrentSearches=0", "concurrentSearches"),
        ("replicas=-1", "replicas"),
        ("replicas=1.5", "replicas"),
        ("replicas=null", "replicas"),
        ("worker.priorityClassName=Low", "priorityClassName"),
        ("worker.architectures={x86_64}", "architectures"),
        ("worker.architectures=arm64", "architectures"),
        ("concurrentSearches=1.5", "concurrentSearches"),
        ("metrics.serviceMonitor.interval=often", "interval"),
        ("metrics.serviceMonitor.interval=0s", "interval"),
        ("metrics.serviceMonitor.interval=30s1m", "interval"),
        ("metrics.serviceMonitor.relabelings=a", "relabelings"),
        ("metrics.dashboard.labels.folder=a b", "labels"),
        ("metrics.prometheusRule.runbookBase=docs/runbooks.md#", "runbookBase"),
        ("nameOverride=Trainwright", "nameOverride"),
        ("fullnameOverride=2nd", "fullnameOverride"),
        ("fullnameOverride=trainwright-plans", "the name of the lease by which releases claim namespaces"),
        (f"fullnameOverride={'a' * 51}", "fullnameOverride"),
        ("resources.limits.memory=1GB", "memory"),
        ("resources.requests.cpu=-1", "cpu"),
        ("resources.claims[0].name=gpu", "claims"),
        ("podLabels.helm\\.sh/chart=x", "podLabels"),
        ("extraEnv[0].value=x", "extraEnv"),
    ],
)
def test_invalid_values_are_refused(helm_template, setting, complaint) -> None:
    done = helm_template("--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize(
    "setting",
    [
        "image.tag=2025.01.02_a-b",
        "metrics=null",
        "metrics.serviceMonitor=null",
        "metrics.serviceMonitor.interval=1m30s",
        "metrics.serviceMonitor.interval=500ms",
        "nameOverride=tw",
        f"fullnameOverride={'a' * 50}",
        "resources.limits.memory=1.5Gi",
        "resources.limits.memory=2e9",
        "resources.limits.memory=2147483648",
        "resources.requests.cpu=0.5",
        "resources.requests.ephemeral-storage=256Mi",
        "resources.limits.cpu=null",
        "resources=null",
        "replicas=0",
        "limits=null",
        "limits.maxPriority=null",
    ],
)
def test_valid_values_are_accepted(rendered, setting) -> None:
    rendered("--set", setting)


def test_a_cluster_without_scheduling_gates_is_refused(helm_template) -> None:
    assert helm_template(kube_version="1.30.0").returncode == 0
    done = helm_template(kube_version="1.29.9")
    assert done.returncode != 0
    assert "kubeVersion: >=1.30.0-0" in done.stderr


def test_every_value_is_described_and_every_default_passes_the_schema(helm_template) -> None:
    lines = (ROOT / "charts/trainwright/values.yaml").read_text().splitlines()
    block = ""
    for number, line in enumerate(lines):
        block = line if line[:1].isalpha() else block
        is_value = line.strip() and not line.lstrip().startswith("#") and ":" in line and not line.endswith(":")
        if is_value and block not in ("resources:", "podSecurityContext:", "securityContext:"):  # Kubernetes' own words
            assert lines[number - 1].lstrip().startswith("#"), f"line {number + 1} has no `# --` comment: {line}"
    assert helm_template().returncode == 0


def test_log_level_and_extra_variables_can_be_chosen(rendered) -> None:
    assert environment(rendered())["TRAINWRIGHT_LOG_LEVEL"] == "info"
    chosen = environment(
        rendered("--set", "logLevel=debug,extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://proxy")
    )
    assert (chosen["TRAINWRIGHT_LOG_LEVEL"], chosen["HTTPS_PROXY"]) == ("debug", "http://proxy")


def test_number_of_parallel_searches_can_be_chosen(rendered) -> None:
    assert environment(rendered())["TRAINWRIGHT_CONCURRENT_SEARCHES"] == "1"
    assert environment(rendered("--set", "concurrentSearches=3"))["TRAINWRIGHT_CONCURRENT_SEARCHES"] == "3"


def test_priority_class_of_gangs_can_be_chosen(rendered) -> None:
    assert "TRAINWRIGHT_WORKER_PRIORITY_CLASS" not in environment(rendered())
    chosen = environment(rendered("--set", "worker.priorityClassName=batch-low"))
    assert chosen["TRAINWRIGHT_WORKER_PRIORITY_CLASS"] == "batch-low"


def test_architectures_of_the_workers_image_can_be_told(rendered) -> None:
    assert "TRAINWRIGHT_WORKER_ARCHITECTURES" not in environment(rendered())
    chosen = environment(rendered("--set", "worker.architectures={amd64,arm64}"))
    assert chosen["TRAINWRIGHT_WORKER_ARCHITECTURES"] == "amd64,arm64"


def test_further_operators_are_spread_over_nodes_and_evicted_one_by_one(rendered) -> None:
    documents = rendered("--set", "replicas=2")
    (deployment,), (budget,) = (of_kind(documents, kind) for kind in ("Deployment", "PodDisruptionBudget"))
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]) == (2, {"type": "Recreate"})
    assert budget["spec"]["maxUnavailable"] == 1
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    own = spec["selector"]["matchLabels"]
    assert spread["labelSelector"]["matchLabels"] == budget["spec"]["selector"]["matchLabels"] == own
    assert own.items() <= spec["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("replicas", [0, 1])
def test_single_operator_has_no_budget_that_holds_up_a_drain(rendered, replicas) -> None:
    documents = rendered("--set", f"replicas={replicas}")
    assert not of_kind(documents, "PodDisruptionBudget")
    (deployment,) = of_kind(documents, "Deployment")
    assert deployment["spec"]["replicas"] == replicas
    assert "topologySpreadConstraints" not in deployment["spec"]["template"]["spec"]


def test_nodes_labels_and_annotations_of_the_pod_can_be_chosen(rendered) -> None:
    documents = rendered(
        *("--set", "nodeSelector.pool=system,podAnnotations.note=x,podLabels.team=a,priorityClassName=high"),
        *("--set", "tolerations[0].operator=Exists,imagePullSecrets[0].name=registry"),
        *("--set-json", 'affinity={"nodeAffinity":{}}'),
    )
    (deployment,) = of_kind(documents, "Deployment")
    template = deployment["spec"]["template"]
    assert template["metadata"]["annotations"] == {"note": "x"}
    assert template["metadata"]["labels"]["team"] == "a"
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["nodeSelector"] == {"pool": "system"}
    assert template["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert template["spec"]["affinity"] == {"nodeAffinity": {}}
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert template["spec"]["priorityClassName"] == "high"
