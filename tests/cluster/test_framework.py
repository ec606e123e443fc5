"""Training script of the user's by torchrun, on two nodes: as trials, and as the job that the winner becomes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from trainwright import documents
from trainwright.plan import Plan
from trainwright.worker_api import TrialReport

SCRIPT = Path(__file__).parent / "framework" / "train.py"
CONFIG_MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "train-script"},
    "data": {"train.py": SCRIPT.read_text()},
}
ITERATIONS = 5


def job(image: str, **variables: str) -> dict[str, Any]:
    """Return the image, the command and the pods of the script."""
    container = {
        "name": "pytorch",
        "env": [
            {"name": name, "value": value} for name, value in (("SCRIPT", "/scripts/train.py"), *variables.items())
        ],
        "volumeMounts": [{"name": "script", "mountPath": "/scripts"}],
    }
    volumes = [{"name": "script", "configMap": {"name": "train-script"}}]
    return {
        "image": image,
        "command": ["bash", "/etc/trainwright/launch.sh"],
        "podTemplate": {"spec": {"volumes": volumes, "containers": [container]}},
    }


def worker_image(workbench: Any) -> str:
    """Return the image that the operator gives workers, which has torch and torchrun."""
    containers = workbench.operator_pod()["spec"]["containers"]
    image: str = next(one["value"] for one in containers[0]["env"] if one["name"] == "TRAINWRIGHT_WORKER_IMAGE")
    return image


@pytest.mark.slow
def test_script_of_the_user_is_measured_and_then_trains_by_the_winner(workbench, small_plan) -> None:
    workbench.apply(CONFIG_MAP)
    image = worker_image(workbench)
    plan = small_plan(
        "own-script",
        training={"globalBatchSize": 64},  # enough computation for two nodes to be worth their all-reduce
        devices={"max": 4},
        search={"planner": "Amp", "limits": {"maxTensorDegree": 1}, "expressibleBy": "Accelerate"},
        trials={
            "topK": 2,
            "baseline": "None",
            "warmupIterations": 2,
            "iterations": ITERATIONS,
            "framework": job(image) | {"stepTimeJsonPath": ".step_seconds", "memoryJsonPath": ".peak_bytes"},
        },
        apply="Run",
        job=job(image, TRAINWRIGHT_ITERATIONS="3"),
    )
    status = workbench.wait_measured(workbench.apply(plan))["status"]
    assert "winner" in status, status
    winner = documents.parse(status["winner"]["plan"], Plan, source="winner.plan")
    trial = next(one for one in status["trials"] if one["name"] == status["winner"]["trial"])
    stored = json.loads(workbench.run("get", "configmap", trial["resultRef"]["configMap"], "--output", "json"))
    report: TrialReport = documents.loads(stored["data"]["report.json"], TrialReport)
    assert len(report.iteration_seconds) == ITERATIONS
    assert trial["measuredSeconds"] == float(f"{statistics.median(report.iteration_seconds):.5g}")
    assert trial["peakMemoryBytes"] > 50_000_000
    assert status["unlimited"]["predictedSeconds"] > 0
    handed_over = status["job"]
    assert (handed_over["kind"], len(handed_over["names"])) == ("PyTorchJob", len(winner.nodes))
    workbench.run("delete", "trainingplan", "own-script", "--wait=true")
    for name in handed_over["names"]:
        workbench.run("wait", "pytorchjob", name, "--for=condition=Succeeded", "--timeout=180s")
    log = workbench.run("logs", f"{handed_over['names'][0]}-master-0")
    assert [line.startswith('{"step": ') for line in log.splitlines()].count(True) == 3
    assert f"ConfigMap/{handed_over['configMap']}" in workbench.children()
