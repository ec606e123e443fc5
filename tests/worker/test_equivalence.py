"""Every kind of plan computes what one process computes on the whole batch, on every family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_plans import random_plan

from trainwright import documents
from trainwright.training import Training

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(600)]

GANG = Path(__file__).with_name("equivalence_gang.py")
GPT = {"gpt": {"layers": 4, "hidden_size": 32, "heads": 8, "sequence_length": 8, "vocabulary_size": 32}}
OTHERS = {
    "llama": {
        "llama": {
            "layers": 3, "hidden_size": 32, "heads": 8, "key_value_heads": 4, "sequence_length": 8,
            "vocabulary_size": 32, "intermediate_size": 64,
        }
    },
    "bert": {"bert": {"layers": 3, "hidden_size": 32, "heads": 4, "sequence_length": 8, "vocabulary_size": 32}},
    "t5": {
        "t5": {
            "layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 8, "decoder_sequence_length": 6,
            "vocabulary_size": 32, "position_buckets": 8,
        }
    },
    "moe": {
        "moe": {
            "layers": 3, "hidden_size": 32, "heads": 4, "sequence_length": 8, "vocabulary_size": 32, "experts": 4,
            "intermediate_size": 32, "expert_every": 2,
        }
    },
    "vit": {"vit": {"layers": 3, "hidden_size": 32, "heads": 4, "image_size": 16, "patch_size": 4, "classes": 8}},
    "swin": {
        "swin": {
            "layers": [1, 2], "hidden_size": 16, "heads": [4, 8], "image_size": 32, "patch_size": 4, "window_size": 4,
            "classes": 8,
        }
    },
    "wide_resnet": {"wide_resnet": {"base_channels": 2, "image_size": 64, "classes": 8}},
    "trans_gan": {
        "trans_gan": {
            "layers": [1, 1, 0, 1], "hidden_size": 64, "heads": 4, "bottom_width": 2, "latent_size": 8,
            "window_size": 4,
        }
    },
}  # fmt: skip
GPT_PLANS = 120
PLANS_OF_EACH = 11
STEPS = 20


def case(name: str, model: dict, seed: int, **fields) -> dict:
    built = documents.parse({**model, "global_batch_size": 1}, Training).model
    degrees = tuple(degree for degree in (1, 2, 4, 8) if built.max_tensor_degree % degree == 0)
    plan = random_plan(seed, layers=len(built.layers), tensor_degrees=degrees, devices=8)
    return {"name": name, "plan": json.loads(documents.dumps(plan)), "model": model, **fields}


GRADIENTS = [
    *(case(f"gpt-{seed}", GPT, seed) for seed in range(GPT_PLANS)),
    *(
        case(f"{family}-{seed}", model, 1000 + 100 * number + seed, by_piece=family == "wide_resnet")
        for number, (family, model) in enumerate(OTHERS.items())
        for seed in range(PLANS_OF_EACH)
    ),
]
TRAININGS = [
    case(f"{optimizer}-{family}-{seed}", model, 2000 + seed, steps=STEPS, optimizer=optimizer, learning_rate=rate)
    for optimizer, rate in (("sgd", 0.02), ("adam", 1e-3))
    for family, model, seeds in (("gpt", GPT, range(4)), ("moe", OTHERS["moe"], (1,)), ("t5", OTHERS["t5"], (3,)))
    for seed in seeds
]
CLIPPED = [
    case(f"clipped-{family}-{seed}", model, 3000 + seed, steps=3, clip_norm=0.05)
    for family, model in (("gpt", GPT), ("t5", OTHERS["t5"]))
    for seed in range(5)
]
HALF = [
    case(f"{dtype}-{seed}", {**GPT, "dtype": dtype}, 4000 + seed, steps=3)
    for dtype in ("bfloat16", "float16")
    for seed in range(4)
]


def names(cases: list[dict]) -> list[str]:
    return [one["name"] for one in cases]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One gang of eight processes runs all plans in turn: starting it is the expensive part."""
    folder = tmp_path_factory.mktemp("equivalence")
    cases, result = folder / "cases.json", folder / "result.json"
    cases.write_text(json.dumps([*GRADIENTS, *TRAININGS, *CLIPPED, *HALF]), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(GANG), str(cases), str(result)], check=False, capture_output=True, text=True, timeout=580
    )
    done = json.loads(result.read_text(encoding="utf-8")) if result.exists() else []
    assert run.returncode == 0, f"after {len(done)} plans: {run.stderr[-4000:]}"
    return {answer["name"]: answer for answer in done}


def test_at_least_two_hundred_plans_are_compared() -> None:
    assert len({json.dumps(one["plan"]) for one in GRADIENTS}) >= 200


def test_the_plans_use_all_that_a_plan_can_say() -> None:
    plans = [one["plan"] for one in GRADIENTS]
    stages = [stage for plan in plans for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    runs = [run for stage in stages for run in stage["layers"]]
    assert {plan["schedule"] for plan in plans} == {"1f1b", "gpipe"}
    assert {run["sharding"] for run in runs if run["data"] > 1} == {"none", "zero1", "zero2", "zero3"}
    assert {run["order"] for run in runs if run["data"] > 1 < run["tensor"]} == {"tensor_inner", "data_inner"}
    assert any(len(plan["pipelines"]) > 2 for plan in plans)
    assert any(len({(run["tensor"], run["data"]) for run in stage["layers"]}) > 1 for stage in stages)
    assert any(len(set(run["rows"])) > 1 for run in runs)
    assert {run["recompute"] for run in runs} == {True, False}


@pytest.mark.parametrize("name", names(GRADIENTS))
def test_loss_and_every_gradient_equal_those_of_one_process(answers: dict, name: str) -> None:
    answer = answers[name]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5


@pytest.mark.parametrize("name", names(TRAININGS))
def test_after_twenty_steps_weights_and_optimizer_agree_with_torchs_optimizer(answers: dict, name: str) -> None:
    """Adam's weights are not compared: where a gradient is all but zero, its first steps follow the rounding's sign."""
    answer = answers[name]
    if name.startswith("sgd"):
        assert answer["weight_error"] < 1e-4
    assert answer["state_error"] < 1e-4
    assert answer["loss_error"] < 1e-4


@pytest.mark.parametrize("name", [name for name in names(TRAININGS) if "gpt" in name])
def test_the_loss_goes_down(answers: dict, name: str) -> None:
    losses = answers[name]["losses"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", names(CLIPPED))
def test_gradients_are_clipped_by_their_norm_over_all_devices(answers: dict, name: str) -> None:
    assert answers[name]["weight_error"] < 1e-5


@pytest.mark.parametrize("name", names(HALF))
def test_half_precision_stays_near_float32(answers: dict, name: str) -> None:
    """Against float32 in one process: the loss within 1 %, each gradient within 5 % of its weight's largest.

    bfloat16 has 8 bits, and errors of its products add up over the layers.
    """
    answer = answers[name]
    assert answer["loss_error"] < 0.01
    assert answer["gradient_error"] < 0.05
