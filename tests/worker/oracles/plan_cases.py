"""Random plans of small models of every family, and the features that each combines."""

from __future__ import annotations

import json
from collections.abc import Hashable
from functools import cache

from random_plans import feature_pairs, in_sequence_parallel, random_plan

from trainwright import documents
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.training import Training

GPT = {"gpt": {"layers": 4, "hidden_size": 32, "heads": 8, "sequence_length": 8, "vocabulary_size": 37}}
OTHERS = {
    "llama": {
        "llama": {
            "layers": 3, "hidden_size": 32, "heads": 8, "key_value_heads": 4, "sequence_length": 8,
            "vocabulary_size": 37, "intermediate_size": 64,
        }
    },
    "bert": {"bert": {"layers": 3, "hidden_size": 32, "heads": 4, "sequence_length": 8, "vocabulary_size": 37}},
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


def model_of(given: dict) -> Model:
    """Return the model that the fields of a training document give, in float32 unless they say otherwise."""
    return _parsed_model(json.dumps(given))


@cache
def _parsed_model(given: str) -> Model:
    return documents.parse({"dtype": "float32", **json.loads(given), "global_batch_size": 1}, Training).model


def plan_of(model: Model, seed: int, devices: int = 8) -> Plan:
    """Return a random plan of a model with the tensor degrees that the model allows."""
    degrees = tuple(degree for degree in (1, 2, 4, 8) if model.max_tensor_degree % degree == 0)
    return random_plan(seed, layers=len(model.layers), tensor_degrees=degrees, devices=devices)


def case(name: str, model: dict, seed: int, devices: int = 8, *, sequence_parallel: bool = False, **fields) -> dict:
    """Return a case of `equivalence_gang.py`: a random plan of a model, and further fields."""
    plan = plan_of(model_of(model), seed, devices)
    plan = in_sequence_parallel(plan) if sequence_parallel else plan
    return {"name": name, "plan": json.loads(documents.dumps(plan)), "model": model, **fields}


def runs_of(plan: dict) -> list[dict]:
    return [run for pipeline in plan["pipelines"] for stage in pipeline["stages"] for run in stage["layers"]]


def combinations_of(case: dict) -> set[Hashable]:
    """Return every pair of the plan's features and the family, and the combinations within its runs of layers."""
    (family,) = (key for key in case["model"] if key != "dtype")
    return feature_pairs(documents.parse(case["plan"], Plan), family)
