"""Every kind of plan computes what one process computes on the whole batch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(240)]

GANG = Path(__file__).with_name("equivalence_gang.py")
PLANS = (
    "pipeline",
    "pipeline-gpipe",
    "data-uneven-rows",
    "tensor",
    "uneven-stages",
    "all-three",
    "all-three-uneven-data-inner-gpipe",
    "mixed-degrees",
    "tied-across-tensor-degrees",
    "growing-tensor-degree",
    "one-micro-batch",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One gang of eight processes runs all plans in turn: starting it is the expensive part."""
    result = tmp_path_factory.mktemp("equivalence") / "result.json"
    run = subprocess.run(
        [sys.executable, str(GANG), str(result)], check=False, capture_output=True, text=True, timeout=220
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(result.read_text(encoding="utf-8"))


def test_no_plan_is_left_out(answers: dict) -> None:
    assert set(answers["plans"]) == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_loss_and_every_gradient_equal_those_of_one_process(answers: dict, name: str) -> None:
    answer = answers["plans"][name]
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5
    # 8 layers: embedding 2, six blocks of 12, head 3; every one of them at least once.
    assert answer["compared"] >= 2 + 6 * 12 + 3


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weights_agree_with_torchs_optimizer_after_ten_steps(answers: dict, optimizer: str) -> None:
    answer = answers["trainings"][optimizer]
    assert answer["weight_error"] < 1e-4
    assert answer["losses"] == pytest.approx(answer["expected_losses"], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_loss_goes_down(answers: dict, optimizer: str) -> None:
    losses = answers["trainings"][optimizer]["losses"]
    assert losses[-1] < losses[0] - 0.3
    assert sorted(losses, reverse=True)[:3] == losses[:3]


def test_the_comparison_notices_a_wrong_gradient() -> None:
    import torch

    spec = importlib.util.spec_from_file_location("equivalence_gang", GANG)
    gang = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gang)
    expected = {(0, "tokens"): torch.tensor([1.0, 2.0])}
    assert gang.worst([{(0, "tokens"): torch.tensor([1.0, 2.0])}], expected) == (0.0, 1)
    assert gang.worst([{(0, "tokens"): torch.tensor([1.0, 2.1])}], expected)[0] > 1e-2
