"""Custom model whose module is mounted into the pods from a ConfigMap, as in the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright import documents
from trainwright.plan import Plan
from trainwright_operator.kubectl.client import condition

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "custom" / "encoder"


@pytest.fixture
def module_and_plan(workbench, small_plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the example's ConfigMap and plan, on two nodes and with few iterations."""
    module, plan = yaml.safe_load_all(workbench.run("kustomize", str(EXAMPLE)))
    return module, small_plan("own", **{part: plan["spec"][part] for part in ("model", "worker")}, devices={"max": 4})


@pytest.mark.slow  # the worker's own tests do the same without a cluster
def test_custom_model_is_profiled_planned_tried_and_answered(workbench, module_and_plan) -> None:
    module, plan = module_and_plan
    workbench.apply(module)
    status = workbench.wait_measured(workbench.apply(plan))["status"]
    assert "winner" in status, status
    winner = documents.parse(status["winner"]["plan"], Plan, source="winner.plan")
    assert len(winner.devices) == 4
    measured = [trial for trial in status["trials"] if trial.get("measuredSeconds")]
    assert abs(measured[0]["predictionError"]) < 0.15, measured


@pytest.mark.slow
def test_plan_waits_for_its_missing_module_and_names_it(workbench, module_and_plan) -> None:
    module, plan = module_and_plan
    name = workbench.apply(plan)
    reason = "ContainerNotCreated"
    waiting = workbench.wait(name, reason, lambda found: condition(found, "Succeeded").get("reason") == reason)
    found = condition(waiting, "Succeeded")
    assert found["status"] == "Unknown"
    assert f"it mounts {module['metadata']['name']}, but its namespace has no ConfigMap" in found["message"]
