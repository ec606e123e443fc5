"""The operator process against a real API server: objects it creates, pins and leaves after SIGKILL or SIGTERM.

No kubelet and no training operator run here; the tests make the pods that they would make and write their status.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import real_api_server
import yaml
from operator_process import (
    NODES,
    Gateway,
    condition,
    deny,
    equip,
    jobs,
    make_pods,
    operator,
    patch_status,
    until,
)

from trainwright_operator.api import crd
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.names import PLACED_ANNOTATION
from trainwright_operator.kube.lease import DURATION_SECONDS
from trainwright_operator.kube.write_guard import WRITE_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def free_devices(equipped_api_server, namespace) -> Iterator[None]:
    """Delete the test's pods: nothing else deletes them here, and they would occupy devices in later tests."""
    yield
    equipped_api_server.kubectl("delete", "pods", "--all", "--namespace", namespace, "--force", "--grace-period=0")


def pinned_nodes(api: Any, namespace: str) -> list[str]:
    nodes = []
    for pod in api.get("pods", "--namespace", namespace)["items"]:
        if pod["spec"].get("schedulingGates"):
            continue
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        nodes.append(required["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])
    return nodes


def copy_without_owner(api: Any, resource: dict[str, Any]) -> None:
    """Create an object that only carries the labels of a plan's."""
    meta = {key: resource["metadata"][key] for key in ("namespace", "labels")} | {"name": "copy"}
    api.create({key: resource[key] for key in ("apiVersion", "kind", "data")} | {"metadata": meta})


@pytest.mark.parametrize("launcher", LauncherKind)
def test_gang_stays_pinned_after_a_kill_and_a_bad_image_is_named(
    equipped_api_server, namespace, training_plan, tmp_path, launcher
) -> None:
    api = equipped_api_server
    api.create(training_plan("killed", {"launcher": launcher}))
    with operator(api, namespace, tmp_path) as (process, _, _):
        (job,) = until("a job for the links", 40, lambda: jobs(api, namespace, launcher))
        process.kill()
    (policy,) = api.get("networkpolicies", "--namespace", namespace)["items"]
    task = api.get("configmap", f"{job['metadata']['name']}-order", "--namespace", namespace)
    assert [owner["uid"] for owner in policy["metadata"]["ownerReferences"]] == [task["metadata"]["uid"]]
    assert len(task["data"]["gang-secret"]) == 64
    copy_without_owner(api, task)
    names = make_pods(api, namespace, job)
    assert pinned_nodes(api, namespace) == []
    with operator(api, namespace, tmp_path) as (_, health, log):
        until("both pods pinned", 40, lambda: len(pinned_nodes(api, namespace)) == len(names))
        assert pinned_nodes(api, namespace) == list(NODES), log.read_text()
        assert len(api.get("networkpolicies", "--namespace", namespace)["items"]) == 1
        for name in names:
            waiting = {"reason": "InvalidImageName", "message": "couldn't parse image name"}
            container = {"name": "pytorch", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
            status = {"phase": "Pending", "containerStatuses": [container | {"state": {"waiting": waiting}}]}
            patch_status(api, "pod", name, status, namespace=namespace)
        until("the end", 40, lambda: condition(api, namespace, "killed", "Succeeded")["status"] == "False")
        assert condition(api, namespace, "killed", "LinksMeasured")["reason"] == "ImagePullFailed"
        assert "couldn't parse image name" in condition(api, namespace, "killed", "Succeeded")["message"]
        until("no job", 40, lambda: not jobs(api, namespace, launcher))
        until("no job is left", 20, lambda: not jobs(api, namespace))
        with urllib.request.urlopen(f"http://127.0.0.1:{health}/healthz", timeout=5) as answer:
            assert answer.status == 200
    resource = api.get("trainingplan", "killed", "--namespace", namespace)
    assert not resource["metadata"].get("finalizers")
    assert "annotations" not in resource["metadata"]
    children = api.get("configmaps", "--namespace", namespace)["items"]
    owned = [c for c in children if c["metadata"]["name"] != "kube-root-ca.crt"]
    assert owned
    (copied,) = (c for c in owned if c["metadata"]["name"] == "copy")  # deleted if it were taken for the gang's task
    owned.remove(copied)
    assert all(c["metadata"]["ownerReferences"][0]["uid"] == resource["metadata"]["uid"] for c in owned)
    events = [e for e in api.get("events", "--namespace", namespace)["items"] if e["reason"] == "ImagePullFailed"]
    assert {event["type"] for event in events} == {"Warning"}


@pytest.mark.slow
def test_a_pod_template_that_the_api_server_refuses_is_not_accepted(
    equipped_api_server, namespace, training_plan, tmp_path
) -> None:
    api = equipped_api_server
    api.create(training_plan("bad-template", {"worker.podTemplate": {"spec": {"tolerations": "all of them"}}}))
    with operator(api, namespace, tmp_path):
        until("the end", 40, lambda: condition(api, namespace, "bad-template", "Succeeded")["status"] == "False")
    accepted = condition(api, namespace, "bad-template", "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "PodTemplateInvalid")
    assert "tolerations" in accepted["message"]
    assert jobs(api, namespace) == []


def test_one_operator_works_at_a_time_and_the_next_takes_over(equipped_api_server, namespace, tmp_path) -> None:
    api = equipped_api_server

    def holder() -> str:
        leases = api.get("leases", "--namespace", namespace)["items"]
        found: str = leases[0]["spec"].get("holderIdentity", "") if leases else ""
        return found

    with operator(api, namespace, tmp_path) as (first, _, _):
        held = until("a holder", 30, holder)
        with operator(api, namespace, tmp_path) as (second, _, second_log):
            until("the second one to wait", 30, lambda: "waiting for lease" in second_log.read_text())
            assert holder() == held
            first.kill()
            until("the second one to take over", 15 + 10, lambda: holder() not in ("", held))
            started = time.monotonic()
            second.send_signal(signal.SIGTERM)
            assert second.wait(timeout=15) == 0, second_log.read_text()
            assert time.monotonic() - started < 10
            assert holder() == ""


def writes_by_operator(api: Any, namespace: str) -> list[tuple[str, str]]:
    """Return the time and the operator of each write in a namespace, leases left out."""
    found = []
    for line in api.audit_log.read_text().splitlines():
        event = json.loads(line)
        place = event.get("objectRef", {})
        is_ours = place.get("namespace") == namespace and event["userAgent"].startswith("trainwright-operator/")
        if is_ours and place.get("resource") != "leases" and event["responseStatus"]["code"] < 300:
            found.append((event["stageTimestamp"], event["userAgent"]))
    return sorted(found)


@pytest.mark.parametrize("trouble", ["frozen", pytest.param("cut off", marks=pytest.mark.slow)])
def test_two_operators_never_write_in_turns(
    equipped_api_server, namespace, training_plan, tmp_path, trouble: str
) -> None:
    """The holder stops for longer than its lease while plans are created, then goes on."""
    api = equipped_api_server
    gateway = Gateway(api.url)
    way = gateway.kubeconfig(api, tmp_path)
    with operator(api, namespace, tmp_path, kubeconfig=way) as (first, _, first_log):
        api.create(training_plan("one"))
        until("a job for the links", 40, lambda: jobs(api, namespace))
        with operator(api, namespace, tmp_path) as (_, _, second_log):
            until("the second one to wait", 30, lambda: "waiting for lease" in second_log.read_text())
            api.create(training_plan("two"))
            if trouble == "frozen":
                first.send_signal(signal.SIGSTOP)
            else:
                gateway.is_open.clear()
            stopped = time.monotonic()
            until("the second one to take over", 30, lambda: "acquired lease" in second_log.read_text())
            assert time.monotonic() - stopped < DURATION_SECONDS + 5
            api.create(training_plan("three"))
            until(
                "the second one to write", 30, lambda: len({who for _, who in writes_by_operator(api, namespace)}) == 2
            )
            first.send_signal(signal.SIGCONT)
            gateway.is_open.set()
            assert first.wait(timeout=20) == 70, first_log.read_text()
            until("jobs of all plans", 40, lambda: len(jobs(api, namespace)) == 3)
    writers = [who for _, who in writes_by_operator(api, namespace)]
    changes = sum(before != after for before, after in pairwise(writers))
    assert changes == 1, writers


def test_second_release_leaves_a_namespace_to_the_first_and_works_in_its_own(
    equipped_api_server, namespace, training_plan_of, tmp_path
) -> None:
    api, own = equipped_api_server, f"{namespace}-own"
    api.kubectl("create", "namespace", own)
    api.create(training_plan_of(namespace, "shared"))
    with operator(api, namespace, tmp_path):
        until("the first one to work", 40, lambda: writes_by_operator(api, namespace))
        with operator(api, own, tmp_path, namespace) as (_, _, log):
            api.create(training_plan_of(own, "alone"))
            until("the second one to work", 40, lambda: writes_by_operator(api, own))
            words = f"namespace {namespace}: release {namespace}/{namespace} works on its plans"
            until("the second one to name the first", 20, lambda: words in log.read_text())
    assert len({who for _, who in writes_by_operator(api, namespace)}) == 1


BUSY_PLANS = 400


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lease_is_renewed_in_time_beside_two_busy_processes(
    equipped_api_server, namespace, training_plan_of, tmp_path
) -> None:
    """The operator begins many plans at once while two other processes never rest."""
    api = equipped_api_server

    def has_worked() -> bool:
        assert process.poll() is None, log.read_text()
        return len(jobs(api, namespace)) == BUSY_PLANS

    with ExitStack() as running:
        process, _, log = running.enter_context(operator(api, namespace, tmp_path))
        until("the lease", 60, lambda: "acquired lease" in log.read_text())
        for _ in range(2):
            busy = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", "while True: pass"])
            running.callback(busy.wait)
            running.callback(busy.kill)
        api.kubectl("create", document=[training_plan_of(namespace, f"plan-{n}") for n in range(BUSY_PLANS)])
        until("a job of each plan", 500, has_worked)
    events = map(json.loads, api.audit_log.read_text().splitlines())
    leases = (one for one in events if one["objectRef"].get("resource") == "leases")
    renewals = [
        datetime.fromisoformat(one["stageTimestamp"])
        for one in leases
        if (one["objectRef"]["namespace"], one["objectRef"]["name"], one["verb"]) == (namespace, namespace, "update")
    ]
    longest = max((after - before).total_seconds() for before, after in pairwise(renewals))
    assert longest < WRITE_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [5, 30, 300])
def test_operator_is_at_work_again_soon_after_the_api_server_was_away(
    equipped_api_server, namespace, training_plan, tmp_path, seconds: int
) -> None:
    """A supervisor restarts the operator as a kubelet would; after 10 s away it has ended, since it lost its lease."""
    api = equipped_api_server
    gateway = Gateway(api.url)
    way = gateway.kubeconfig(api, tmp_path)
    api.create(training_plan("before"))
    back = threading.Event()

    def supervise() -> None:
        while not back.is_set():
            with operator(api, namespace, tmp_path, kubeconfig=way) as (process, _, _):
                while process.poll() is None and not back.wait(0.2):
                    pass
            back.wait(10)

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        until("a job for the links", 60, lambda: jobs(api, namespace))
        gateway.is_open.clear()
        api.create(training_plan("meanwhile"))
        time.sleep(seconds)
        gateway.is_open.set()
        # A restarted container is the same holder; here its process has another number and waits for the former lease.
        until("jobs of both plans", 30 + DURATION_SECONDS, lambda: len(jobs(api, namespace)) == 2)
    finally:
        back.set()
        supervisor.join()


@pytest.mark.slow
def test_change_is_noticed_soon_after_the_api_server_was_away_through_a_compaction(
    programs, training_plan_of, tmp_path
) -> None:
    """The watches come back with versions that etcd no longer has (410 Gone): nothing tells of what was deleted meanwhile."""
    with ExitStack() as running:
        api = real_api_server.start(tmp_path, running, "--watch-cache=false")
        api.kubectl("create", document=crd.crd_manifest())
        api.establish("crd/trainingplans.trainwright.dev")
        equip(api)
        gateway = Gateway(api.url)
        api.create(training_plan_of("default", "measured"))
        way = gateway.kubeconfig(api, tmp_path)
        process, _, log = running.enter_context(operator(api, "default", tmp_path, kubeconfig=way))
        (job,) = until("a job for the links", 60, lambda: jobs(api, "default"))
        first, *_ = make_pods(api, "default", job)
        until("both pods placed", 60, lambda: PLACED_ANNOTATION in api.kubectl("get", "configmaps", "--output", "yaml"))
        gateway.cut()  # for less than the lease lasts: a new process would list everything anyway
        api.kubectl("delete", "pod", first, "--namespace", "default", "--force", "--grace-period=0")
        api.compact()
        gateway.is_open.set()

        def has_noticed() -> bool:
            assert process.poll() is None, log.read_text()
            return "links-attempt-1" in api.kubectl("get", "configmaps", "--namespace", "default", "--output", "name")

        until("the lost pod to be noticed", 30, has_noticed)
        gone = api.try_kubectl("get", "--raw", "/api/v1/pods?watch=1&timeoutSeconds=1&resourceVersion=1")
        assert "too old" in gone.stdout + gone.stderr, "nothing was compacted"


def roles_of(helm_template: Any, home: str, *namespaces: str) -> list[dict[str, Any]]:
    """Return the chart's roles and bindings for an operator in `home` that watches these namespaces."""
    names = f"watchNamespaces={{{','.join(namespaces)}}}"
    done = helm_template("--namespace", home, "--set", names, "--set", f"fullnameOverride={home}")
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if "Role" in document["kind"]]


@pytest.mark.slow
def test_namespace_without_the_role_blocks_no_other_and_resumes_when_granted(
    equipped_api_server, namespace, training_plan, helm_template, tmp_path
) -> None:
    api, late = equipped_api_server, f"{namespace}-late"
    api.kubectl("create", "namespace", late)
    roles = roles_of(helm_template, namespace, namespace, late)
    granted_late = [role for role in roles if role["metadata"].get("namespace") == late]
    api.kubectl("apply", document=[role for role in roles if role not in granted_late])
    api.kubectl("create", "serviceaccount", namespace, "--namespace", namespace)
    configuration = json.loads(api.kubeconfig.read_text())
    token = api.kubectl("create", "token", namespace, "--namespace", namespace).strip()
    configuration["users"][0]["user"]["token"] = token
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(configuration))
    api.create(training_plan("early"))
    in_late = training_plan("late")
    in_late["metadata"]["namespace"] = late
    api.create(in_late)
    with operator(api, namespace, tmp_path, late, kubeconfig=kubeconfig) as (process, _, log):
        until("a job beside a namespace without the role", 40, lambda: jobs(api, namespace))
        assert jobs(api, late) == []
        api.kubectl("apply", document=granted_late)
        until("a job where the role is now", 60, lambda: jobs(api, late))
        until("to watch there", 40, lambda: f"watching namespaces: {namespace}, {late}" in log.read_text())
        assert process.poll() is None, log.read_text()


@pytest.mark.slow
def test_policy_that_blocks_pods_is_reported_in_the_status(
    equipped_api_server, namespace, training_plan, tmp_path
) -> None:
    api = equipped_api_server
    deny(
        api,
        namespace,
        operation="UPDATE",
        group="",
        resource="pods",
        expression="false",
        message="pods stay as they were made",
    )
    api.create(training_plan("forbidden"))
    with operator(api, namespace, tmp_path) as (_, _, log):
        (job,) = until("a job for the links", 40, lambda: jobs(api, namespace))
        first, *_ = make_pods(api, namespace, job)

        def told() -> str:
            found: str = condition(api, namespace, "forbidden", "LinksMeasured").get("message", "")
            return found if "rejects" in found else ""

        message = until("the policy's words", 40, told)
    assert f"the API server rejects the assignment of pod {first} to node {NODES[0]}" in message, log.read_text()
    assert "pods stay as they were made" in message
