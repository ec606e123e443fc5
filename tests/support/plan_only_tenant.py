"""Tenant of a shared cluster, with rights on TrainingPlans alone, whose plan hands over a job that would run for ever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright_demo.install import OPERATOR_NAMESPACE

DEADLINE_SECONDS = 300.0
FOR_EVER = ["sh", "-c", "trap 'exit 0' TERM; sleep 86400 & wait"]


@contextmanager
def jobs_of_plans_own(workbench: Any) -> Iterator[None]:
    """Let the operator hand over jobs that plans own, as with handover.allow: Owned."""
    try:
        _restart_operator(workbench, "Owned")
        yield
    finally:
        _restart_operator(workbench, "Free")


def _restart_operator(workbench: Any, rule: str) -> None:
    where = ("--namespace", OPERATOR_NAMESPACE)
    workbench.kubectl.run(*where, "set", "env", "deployment/trainwright", f"TRAINWRIGHT_HANDOVER={rule}")
    workbench.kubectl.run(*where, "rollout", "status", "deployment/trainwright", "--timeout=180s")


def hold_and_give_back(workbench: Any, name: str) -> None:
    """Have a tenant make the finished plan hold devices for ever, give them back, and do it again by deleting the plan."""
    tenant = f"tenant-{workbench.namespace}"
    workbench.run("create", "rolebinding", tenant, "--clusterrole=trainwright-editor", f"--user={tenant}")

    rights = workbench.run("--as", tenant, "auth", "can-i", "--list")
    assert "trainingplans" in rights
    assert not any(kind in rights for kind in ("pytorchjobs", "jobsets", "configmaps", " pods"))
    containers = workbench.operator_pod()["spec"]["containers"]
    image = next(one["value"] for one in containers[0]["env"] if one["name"] == "TRAINWRIGHT_WORKER_IMAGE")

    def edit(**spec: Any) -> None:
        patch = json.dumps({"spec": spec})
        workbench.run("--as", tenant, "patch", "trainingplan", name, "--type=merge", "--patch", patch)

    def held() -> Any:
        return workbench.get(name)["status"].get("heldJob")

    def jobs() -> list[str]:
        found: list[str] = workbench.run("get", "pytorchjobs,jobsets", "--output", "name").split()
        return found

    def pods() -> str:
        selector = ("--selector", "trainwright.dev/handed-over-by")
        found: str = workbench.run("get", "pods", *selector, "--output", "name")
        return found

    with jobs_of_plans_own(workbench):
        edit(apply="Run", job={"image": image, "command": FOR_EVER})
        _until("the plan to hold devices", lambda: (held() or {}).get("devices"))
        assert "Running, " in workbench.run("--as", tenant, "get", "trainingplans", name)
        edit(apply="Never")
        _until("the plan to hold nothing", lambda: held() is None)
        _until("the devices to be free", lambda: not jobs() and not pods())
        edit(apply="Run")
        _until("the plan to hold devices again", lambda: (held() or {}).get("devices"))
        workbench.run("--as", tenant, "delete", "trainingplan", name, "--wait=false")
        _until("the devices to be free again", lambda: not jobs() and not pods())


def _until(what: str, reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not reached():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_SECONDS:.0f} s"
        time.sleep(1.0)
