"""The executor on GPUs with NCCL, compared with one process on the CPU, under plans for the available GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_plans import random_plan

from trainwright import documents
from trainwright.training import Training

GANG = Path(__file__).resolve().parents[1] / "worker" / "equivalence_gang.py"
GPUS = min(torch.cuda.device_count(), 8)
MODELS = {
    "gpt": {"gpt": {"layers": 4, "hidden_size": 64, "heads": 8, "sequence_length": 32, "vocabulary_size": 64}},
    "llama": {
        "llama": {
            "layers": 3, "hidden_size": 64, "heads": 8, "key_value_heads": 4, "sequence_length": 32,
            "vocabulary_size": 64, "intermediate_size": 128,
        }
    },
    "t5": {"t5": {"layers": 2, "hidden_size": 64, "heads": 4, "sequence_length": 16, "vocabulary_size": 64}},
    "moe": {
        "moe": {
            "layers": 2, "hidden_size": 64, "heads": 4, "sequence_length": 16, "vocabulary_size": 64, "experts": 4,
            "intermediate_size": 64,
        }
    },
    "vit": {"vit": {"layers": 3, "hidden_size": 64, "heads": 4, "image_size": 32, "patch_size": 8, "classes": 8}},
    "wide_resnet": {"wide_resnet": {"base_channels": 4, "image_size": 64, "classes": 8}},
}  # fmt: skip
PLANS_OF_EACH = 8


def case(name: str, model: dict, seed: int, **fields) -> dict:
    built = documents.parse({"dtype": "float32", **model, "global_batch_size": 1}, Training).model
    degrees = tuple(degree for degree in (1, 2, 4, 8) if built.max_tensor_degree % degree == 0)
    plan = random_plan(seed, layers=len(built.layers), tensor_degrees=degrees, devices=max(GPUS, 1))
    return {"name": name, "plan": json.loads(documents.dumps(plan)), "model": model, **fields}


FLOAT32 = [
    case(f"{family}-{seed}", model, 100 * number + seed, steps=3, by_piece=family == "wide_resnet")
    for number, (family, model) in enumerate(MODELS.items())
    for seed in range(PLANS_OF_EACH)
]
HALF = [
    case(f"{dtype}-{seed}", {**MODELS["gpt"], "dtype": dtype}, 5000 + seed, steps=3)
    for dtype in ("bfloat16", "float16")
    for seed in range(4)
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("gpu")
    cases, result = folder / "cases.json", folder / "result.json"
    cases.write_text(json.dumps([*FLOAT32, *HALF]), encoding="utf-8")
    environment = {**os.environ, "GANG_WORLD": str(GPUS), "GANG_BACKEND": "nccl"}
    run = subprocess.run(
        [sys.executable, str(GANG), str(cases), str(result)], check=False, capture_output=True, text=True,
        timeout=580, env=environment,
    )  # fmt: skip
    done = json.loads(result.read_text(encoding="utf-8")) if result.exists() else []
    assert run.returncode == 0, f"after {len(done)} plans: {run.stderr[-4000:]}"
    return {answer["name"]: answer for answer in done}


@pytest.mark.parametrize("name", [one["name"] for one in FLOAT32])
def test_loss_and_gradients_equal_the_cpu(answers: dict, name: str) -> None:
    """Equality up to the order of float32 sums."""
    answer = answers[name]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-4
    assert answer["gradient_error"] < 1e-3


@pytest.mark.parametrize("name", [one["name"] for one in HALF])
def test_half_precision_stays_near_float32(answers: dict, name: str) -> None:
    answer = answers[name]
    assert answer["loss_error"] < 0.01
    assert answer["gradient_error"] < 0.05
