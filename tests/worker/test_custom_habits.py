"""Habits of users' layers and rows that plans train as one process does: two stages, uneven replicas, sharding, recompute."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import two_device_plans
from gang_answers import answers_of

from trainwright import documents
from trainwright.strategy import Sharding
from trainwright.training import Training
from trainwright_worker.model_description.description import describe

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(300)]

EQUIVALENCE = Path(__file__).with_name("equivalence_gang.py")
HABITS = (
    "compiled", "normalised_weights", "weights_normalised_by_a_hook", "routed", "complex_by_parts", "changes_its_inputs",
    "data_loader",
)  # fmt: skip
ROWS, MICRO_BATCHES, LAYERS = 6, 3, 5
stages = partial(two_device_plans.stages, LAYERS, 2, ROWS, MICRO_BATCHES)
replicas = partial(two_device_plans.replicas, LAYERS, (1, 5), MICRO_BATCHES)
PLANS = {
    "stages": stages(recompute=True),
    "replicas": replicas(),
    "sharded": replicas(recompute=True, sharding=Sharding.ZERO3),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cases = []
    for name in HABITS:
        described = describe(f"trained_habits:{name}", check_seconds=0, dtypes=[torch.float32])
        document = {"custom": documents.dump(Training(1, custom=described))["custom"]}
        cases += [
            {"name": f"{name}, {plan}", "model": document, "plan": documents.dump(PLANS[plan]), "steps": 3}
            for plan in PLANS
        ]
    return answers_of(EQUIVALENCE, tmp_path_factory.mktemp("trained"), cases, processes=2)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", HABITS)
def test_every_plan_trains_it_as_one_process_does(trained: dict[str, dict], name: str, plan: str) -> None:
    answer = trained[f"{name}, {plan}"]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5
    assert answer["weight_error"] < 1e-4
