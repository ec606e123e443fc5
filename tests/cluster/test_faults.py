"""Faults on a cluster end with a reason, keep the measurements, and leave no objects."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from trainwright_operator.kubectl.client import condition

LAUNCHERS = ("PyTorchJob", "JobSet")


def trial(resource, name):
    return next(found for found in resource["status"]["trials"] if found["name"] == name)


def succeeded(resource):
    return condition(resource, "Succeeded")


def in_the_middle_of(phase, workbench):
    """Return a test of whether the phase's work is running: a pod, or the search, which has no pod."""

    def reached(resource):
        if resource.get("status", {}).get("phase") != phase:
            return False
        return phase == "Planning" or "Running" in workbench.run("get", "pods", "--no-headers", "--ignore-not-found")

    return reached


@pytest.mark.slow
def test_operator_killed_in_every_phase_finds_the_same_winner(workbench, small_plan) -> None:
    measuring: dict[str, Any] = {
        "profiling": {"warmupIterations": 1, "iterations": 3, "maxAgeSeconds": 0},
        "links": {"maxAgeSeconds": 0},
    }
    undisturbed = workbench.wait_measured(workbench.apply(small_plan("undisturbed", **measuring)))
    name = workbench.apply(small_plan("killed", **measuring))
    workbench.kill_operator()  # while it accepts the plan or looks for devices: both take milliseconds
    for phase in ("MeasuringLinks", "Profiling", "Planning", "Trying"):
        workbench.wait(name, f"the middle of {phase}", in_the_middle_of(phase, workbench))
        workbench.kill_operator()
        assert succeeded(workbench.get(name))["status"] == "Unknown", "the kill came after the end"
    resource = workbench.wait_measured(name)
    assert succeeded(resource)["status"] == "True", resource["status"]
    assert resource["status"]["winner"]["trial"] == undisturbed["status"]["winner"]["trial"]
    assert resource["status"]["winner"]["plan"] == undisturbed["status"]["winner"]["plan"]
    measured = [found for found in resource["status"]["trials"] if found.get("measuredSeconds")]
    assert len(measured) == len(undisturbed["status"]["trials"])


@pytest.mark.parametrize("launcher", ["JobSet", pytest.param("PyTorchJob", marks=pytest.mark.slow)])
def test_a_crashing_candidate_is_named_and_another_one_wins(workbench, small_plan, launcher) -> None:
    plan = small_plan(annotations={"trainwright.dev/rehearse-fault": "candidate-1=crash"}, launcher=launcher)
    resource = workbench.wait_measured(workbench.apply(plan))
    crashed = trial(resource, "candidate-1")
    assert (crashed["state"], crashed["reason"]) == ("Failed", "Crashed"), crashed
    assert resource["status"]["winner"]["trial"] == "candidate-2"
    assert succeeded(resource)["status"] == "True"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_worker_is_named_with_its_peers_log_kept_and_another_candidate_wins(
    workbench, small_plan, launcher
) -> None:
    """Kill one of two pods in the middle of a trial: the message has its exit code, whatever its peer reports."""
    plan = small_plan(
        devices={"products": ["emulated-v100"], "max": 4},
        trials={"topK": 2, "baseline": "None", "warmupIterations": 1, "iterations": 400},
        launcher=launcher,
    )
    name = workbench.apply(plan)
    selector = ("--selector", "trainwright.dev/gang=candidate-1", "--output", "json")

    def pods() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(workbench.run("get", "pods", *selector))["items"]
        return found

    def runs(_: Any) -> bool:
        return sum(pod["status"]["phase"] == "Running" for pod in pods()) >= 2

    workbench.wait(name, "a running trial of two pods", runs)
    kinds = {owner["kind"] for pod in pods() for owner in pod["metadata"]["ownerReferences"]}
    assert kinds == {"PyTorchJob" if launcher == "PyTorchJob" else "Job"}
    time.sleep(8)
    workbench.kill_processes(next(pod for pod in pods() if "trainwright.dev/rendezvous" not in pod["metadata"]["labels"]
                                  or pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index") == "1"))  # fmt: skip
    workbench.wait(name, "the end of the trial", lambda found: trial(found, "candidate-1")["state"] == "Failed")
    killed = trial(workbench.get(name), "candidate-1")
    assert killed["reason"] == "Crashed", killed
    assert "exit code 137" in killed["message"], killed
    stored = json.loads(workbench.run("get", "configmap", killed["resultRef"]["configMap"], "--output", "json"))
    assert "rank 0" in stored["data"]["log"], stored["data"]


@pytest.mark.slow
def test_plan_waits_for_an_image_that_cannot_be_pulled_with_that_reason(workbench, small_plan) -> None:
    name = workbench.apply(small_plan(worker={"image": "localhost/no-such-image:1"}))
    workbench.wait(name, "ImagePullFailed", lambda found: _reason(found) == "ImagePullFailed")
    assert "no-such-image" in succeeded(workbench.get(name))["message"]
    workbench.wait(name, "the end of the attempt", lambda found: "tried again at" in succeeded(found)["message"])
    resource = workbench.get(name)
    assert (succeeded(resource)["status"], _reason(resource)) == ("Unknown", "ImagePullFailed")
    assert "no-such-image" in succeeded(resource)["message"]


def _reason(resource) -> str:
    """Return what the plan waits for, or an empty string before its first status."""
    return next(
        (one["reason"] for one in resource.get("status", {}).get("conditions", []) if one["type"] == "Succeeded"), ""
    )


@pytest.mark.slow
def test_plan_deleted_halfway_leaves_nothing_after_a_minute(workbench, small_plan) -> None:
    name = workbench.apply(small_plan())
    workbench.wait(
        name,
        "a running trial",
        lambda found: any(t.get("state") == "Running" for t in found.get("status", {}).get("trials", [])),
    )
    assert workbench.children()
    workbench.run("delete", "trainingplan", name, "--wait=false")
    deadline = time.monotonic() + 60
    while (left := workbench.children()) and time.monotonic() < deadline:
        time.sleep(1)
    assert not left


@pytest.mark.slow
def test_a_plan_without_trials_ends_with_its_candidates(workbench, small_plan) -> None:
    resource = workbench.wait_finished(workbench.apply(small_plan(trials={"topK": 0})))
    assert (succeeded(resource)["status"], succeeded(resource)["reason"]) == ("True", "PlannedOnly")
    candidates = json.loads(
        workbench.run("get", "configmap", resource["status"]["candidatesRef"]["configMap"], "--output", "json")
    )
    assert candidates["data"]


@pytest.mark.slow
def test_plan_goes_on_without_a_node_that_is_cordoned(workbench, small_plan) -> None:
    name = workbench.apply(small_plan(settlingSeconds=10))
    workbench.wait(name, "profiling", in_the_middle_of("Profiling", workbench))
    node = workbench.get(name)["status"]["cluster"]["nodes"][0]["name"]
    workbench.run("cordon", node)
    try:
        resource = workbench.wait_measured(name)
    finally:
        workbench.run("uncordon", node)
    assert succeeded(resource)["status"] == "True", resource["status"]["conditions"]
    status = resource["status"]
    assert (status["cluster"]["revision"], status["winner"]["revision"]) == (2, 2)
    assert node not in {found["name"] for found in status["cluster"]["nodes"]}
    assert node not in json.dumps(status["winner"]["plan"])
