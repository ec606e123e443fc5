"""A mixture of experts planned by `alpa`: trials run its shardings of operators and degrees alone, and the answer compares them."""

from __future__ import annotations

import pytest

from trainwright import documents
from trainwright.plan import Plan
from trainwright_operator.kubectl.client import condition

MIXTURE = {
    "layers": 2,
    "hiddenSize": 64,
    "heads": 4,
    "experts": 4,
    "intermediateSize": 1024,
    "sequenceLength": 64,
    "vocabularySize": 512,
}


@pytest.mark.slow  # the simulated cluster tests the decision, and the worker's tests the shardings
def test_trials_of_alpa_run_shardings_and_degrees_and_the_answer_compares_them(workbench, small_plan) -> None:
    plan = small_plan("mixture", model={"moe": MIXTURE}, devices={"max": 4}, search={"planner": "Alpa"})
    resource = workbench.wait_measured(workbench.apply(plan))
    status = resource["status"]
    sorts = {" operators " in trial["summary"] for trial in status["trials"]}
    assert sorts == {True, False}, status["trials"]
    assert all(trial["state"] == "Succeeded" for trial in status["trials"]), status["trials"]
    assert "shardings of operators" in condition(resource, "Succeeded")["message"]
    winner = documents.parse(status["winner"]["plan"], Plan, source="winner.plan")
    assert winner.has_operators == (" operators " in status["winner"]["summary"])
