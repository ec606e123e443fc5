"""Rights of the operator under the rendered roles on a real API server: those it needs, and no more."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright_operator.api import GROUP

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = "trainwright-system"
SERVICE_ACCOUNT = "trainwright"

CLUSTER_READ = [
    ("list", "", "nodes"),
    ("list", "resource.k8s.io", "resourceslices"),
    ("list", "resource.k8s.io", "deviceclasses"),
    ("list", "kueue.x-k8s.io", "clusterqueues"),
    ("list", "kueue.x-k8s.io", "resourceflavors"),
    ("list", "kueue.x-k8s.io", "topologies"),
    ("list", "apiextensions.k8s.io", "customresourcedefinitions"),
    ("watch", "apiextensions.k8s.io", "customresourcedefinitions"),
]
NAMESPACES_READ = [(verb, "", "namespaces") for verb in ("list", "watch")]
"""Needed where namespaces are named: whether they are there."""
NAMESPACED = [
    (verb, group, resource)
    for group, resource, verbs in (
        (GROUP, "trainingplans", "get list watch delete"),
        (GROUP, "trainingplans/status", "patch"),
        ("kubeflow.org", "pytorchjobs", "create get list watch delete"),
        ("jobset.x-k8s.io", "jobsets", "create get list watch delete"),
        ("kueue.x-k8s.io", "localqueues", "list"),
        ("kueue.x-k8s.io", "workloads", "list"),
        ("resource.k8s.io", "resourceclaims", "list"),
        ("", "pods", "list watch patch"),
        ("", "pods/log", "get"),
        ("", "configmaps", "create get list patch delete"),
        ("", "events", "create list"),
        ("networking.k8s.io", "networkpolicies", "create"),
    )
    for verb in verbs.split()
]
LEASE_CREATED = [("create", "coordination.k8s.io", "leases")]
CLAIM = "trainwright-plans"
LEASE_HELD = [(verb, "coordination.k8s.io", "leases") for verb in ("get", "update")]
"""Of the one lease that is named after the release."""
ALL_PODS = [("list", "resource.k8s.io", "resourceclaims"), ("list", "", "pods")]
"""With rbac.allPods."""
NEVER = [
    *((verb, "", "secrets") for verb in ("get", "list", "watch", "create", "update", "patch", "delete")),
    *((verb, "", "nodes") for verb in ("get", "watch", "create", "update", "patch", "delete")),
    *(
        (verb, "resource.k8s.io", resource)
        for resource in ("resourceslices", "deviceclasses", "resourceclaims")
        for verb in ("get", "watch", "create", "update", "patch", "delete")
    ),
    *((verb, "", "configmaps") for verb in ("watch", "update", "deletecollection")),
    *((verb, "networking.k8s.io", "networkpolicies") for verb in ("get", "list", "update", "patch", "delete")),
    *((verb, "", "events") for verb in ("get", "watch", "update", "patch", "delete")),
    *((verb, "", "nodes/status") for verb in ("update", "patch")),
    *(("create", "", f"pods/{door}") for door in ("exec", "attach", "portforward", "eviction", "binding")),
    *((verb, "", "pods") for verb in ("get", "create", "update", "delete", "deletecollection")),
    *((verb, "", "serviceaccounts") for verb in ("create", "update", "patch")),
    ("create", "", "serviceaccounts/token"),
    *((verb, "", "namespaces") for verb in ("create", "delete", "patch")),
    *((verb, "apiextensions.k8s.io", "customresourcedefinitions") for verb in ("create", "update", "patch", "delete")),
    *(
        (verb, "rbac.authorization.k8s.io", resource)
        for resource in ("roles", "rolebindings", "clusterroles", "clusterrolebindings")
        for verb in ("create", "update", "patch", "bind", "escalate")
    ),
    *((verb, GROUP, "trainingplans") for verb in ("create", "update", "patch", "deletecollection")),
    *((verb, GROUP, "trainingplans/status") for verb in ("get", "update")),
    *((verb, "kubeflow.org", "pytorchjobs") for verb in ("update", "patch", "deletecollection")),
    *((verb, "jobset.x-k8s.io", "jobsets") for verb in ("update", "patch", "deletecollection")),
    *((verb, "kueue.x-k8s.io", "workloads") for verb in ("watch", "create", "update", "patch", "delete")),
    ("impersonate", "", "users"),
    ("impersonate", "", "serviceaccounts"),
    *((verb, "coordination.k8s.io", "leases") for verb in ("list", "watch", "patch", "delete")),
]

Right = tuple[str, str, str]
"""Verb, API group, resource."""


@pytest.fixture(scope="module")
def installed(api_server) -> Any:
    """Return the API server with the plain manifests applied."""
    done = api_server.try_kubectl("apply", "--server-side", "-f", str(ROOT / "deploy/manifests/trainwright.yaml"))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return api_server


def allowed(api: Any, user: str, rights: Iterable[Right], namespace: str, name: str = "") -> dict[Right, bool]:
    """Ask the API server's authorizer for each right of this user, on any object or on the named one."""
    rights = list(rights)
    reviews = []
    for verb, group, resource in rights:
        kind, _, sub = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": kind, "subresource": sub, "namespace": namespace}
        attributes |= {"name": name} if name else {}
        reviews.append(
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": attributes},
            }
        )
    answer = api.kubectl("create", "--output", "json", document={"apiVersion": "v1", "kind": "List", "items": reviews})
    found = [json.loads(part) for part in split_objects(answer)]
    found = [item for one in found for item in one.get("items", [one])]
    assert len(found) == len(rights)
    return {right: review["status"]["allowed"] for right, review in zip(rights, found, strict=True)}


def split_objects(text: str) -> list[str]:
    """Split concatenated JSON objects."""
    decoder, parts, place = json.JSONDecoder(), [], 0
    while place < len(text.rstrip()):
        _, end = decoder.raw_decode(text, place)
        parts.append(text[place:end])
        place = end + len(text[end:]) - len(text[end:].lstrip())
    return parts


def operator() -> str:
    return f"system:serviceaccount:{INSTALLED}:{SERVICE_ACCOUNT}"


def test_the_operator_may_do_what_it_needs(installed) -> None:
    missing = [
        right
        for right, yes in (
            *allowed(installed, operator(), CLUSTER_READ, "").items(),
            *allowed(installed, operator(), NAMESPACED, "default").items(),
            *allowed(installed, operator(), LEASE_CREATED, INSTALLED).items(),
            *allowed(installed, operator(), LEASE_HELD, INSTALLED, name=SERVICE_ACCOUNT).items(),
            *allowed(installed, operator(), [*LEASE_CREATED, *LEASE_HELD], "default", name=CLAIM).items(),
        )
        if not yes
    ]
    assert not missing


def test_the_operator_may_do_nothing_that_it_does_not_need(installed) -> None:
    for namespace in ("default", INSTALLED, "kube-system"):
        too_many = [right for right, yes in allowed(installed, operator(), NEVER, namespace).items() if yes]
        assert not too_many, namespace
    assert not any(allowed(installed, operator(), NAMESPACES_READ, "").values())
    assert not any(allowed(installed, operator(), LEASE_HELD, INSTALLED, name="another").values())
    leases_elsewhere = allowed(installed, operator(), LEASE_HELD, "default", name=SERVICE_ACCOUNT)
    assert not any(leases_elsewhere.values()), leases_elsewhere


@pytest.mark.parametrize("all_pods", [False, True], ids=["its own pods", "all pods"])
def test_rights_are_limited_to_named_namespaces(installed, helm_template, all_pods) -> None:
    watched, other, home = (f"test-{uuid.uuid4().hex[:8]}" for _ in range(3))
    for name in (watched, other, home):
        installed.kubectl("create", "namespace", name)
    settings = (
        f"watchNamespaces={{{watched}}}",
        f"fullnameOverride={home}",
        "rbac.aggregate=false",
        f"rbac.allPods={str(all_pods).lower()}",
    )
    done = helm_template("--namespace", home, *(part for setting in settings for part in ("--set", setting)))
    roles = [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if "Role" in document["kind"]]
    installed.kubectl("apply", document=roles)
    user = f"system:serviceaccount:{home}:{home}"
    assert all(allowed(installed, user, NAMESPACED, watched).values())
    assert all(allowed(installed, user, [*CLUSTER_READ, *NAMESPACES_READ], "").values())
    for elsewhere in (other, ""):
        found = allowed(installed, user, NAMESPACED, elsewhere)
        assert [right for right, yes in found.items() if yes] == (ALL_PODS if all_pods else [])
    assert all(allowed(installed, user, LEASE_HELD, home, name=home).values())
    assert all(allowed(installed, user, [*LEASE_CREATED, *LEASE_HELD], watched, name=CLAIM).values())
    assert not any(allowed(installed, user, LEASE_HELD, other, name=CLAIM).values())


@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [
        ("editor", "create delete deletecollection get list patch update watch", ""),
        ("viewer", "get list watch", "create delete deletecollection patch update"),
    ],
)
def test_people_edit_or_view_plans_and_never_their_status(installed, namespace, role, may, may_not) -> None:
    user = f"{role}-{namespace}"
    installed.kubectl(
        "create", "rolebinding", user, f"--clusterrole=trainwright-{role}", f"--user={user}", f"--namespace={namespace}"
    )

    def on_plans(verbs: str, resource: str = "trainingplans") -> list[Right]:
        return [(verb, GROUP, resource) for verb in verbs.split()]

    assert all(allowed(installed, user, on_plans(may), namespace).values())
    assert not any(allowed(installed, user, [*on_plans(may_not), ("get", "", "pods")], namespace).values())
    assert not any(allowed(installed, user, on_plans("update patch", "trainingplans/status"), namespace).values())


def test_the_operators_pod_passes_the_restricted_pod_security_standard(
    installed, namespace, training_plan: Callable[..., dict[str, Any]]
) -> None:
    installed.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    manifests = yaml.load_all((ROOT / "deploy/manifests/trainwright.yaml").read_text(), yaml.CSafeLoader)
    deployment = next(document for document in manifests if document["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "namespace": namespace, "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    }
    installed.kubectl("create", "--dry-run=server", document=pod)
    del pod["spec"]["securityContext"]["runAsNonRoot"]
    assert "violates PodSecurity" in installed.refusal(pod), "the standard is not enforced here, so nothing was shown"
