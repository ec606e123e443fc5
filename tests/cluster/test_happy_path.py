"""A plan over the whole mixed cluster: discovered, measured, profiled, planned, tried and answered."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright import documents
from trainwright.plan import Plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    plan: dict[str, Any] = yaml.safe_load((ROOT / "deploy/examples/gpt2-small-emulated.yaml").read_text())
    return plan


def test_the_example_ends_with_a_winner_that_beats_the_baseline_and_was_predicted(workbench, example) -> None:
    name = workbench.apply(example)
    resource = workbench.wait_finished(name)
    status = resource["status"]
    states = {found["type"]: found["status"] for found in status["conditions"]}
    for kind in ("Accepted", "NodesDiscovered", "LinksMeasured", "Profiled", "Planned", "TrialsCompleted", "Succeeded"):
        assert states[kind] == "True", status["conditions"]

    winner = status["winner"]
    assert winner["speedupOverBaseline"] > 1.2
    assert winner["emulated"] is True
    measured = [trial for trial in status["trials"] if trial.get("measuredSeconds")]
    assert {trial["role"] for trial in measured} == {"Candidate", "Baseline"}
    assert winner["measuredSeconds"] == min(trial["measuredSeconds"] for trial in measured)
    assert statistics.fmean(abs(trial["predictionError"]) for trial in measured) < 0.10, measured

    plan = documents.parse(winner["plan"], Plan, source="winner.plan")
    assert len(plan.devices) == status["cluster"]["devices"] == 8

    columns = workbench.run("get", "trainingplan", name)
    assert str(winner["measuredSeconds"]) in columns, columns
    events = json.loads(workbench.run("get", "events", "--output", "json"))["items"]
    reasons = {event["reason"] for event in events if event["involvedObject"]["kind"] == "TrainingPlan"}
    assert len(reasons) >= 6, reasons
