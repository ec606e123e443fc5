"""Placement on the device: no rank of a plan mixes tensors of the device with tensors of the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from pathlib import Path

import pytest
from gang_answers import answers_of
from nightly import covering
from plan_cases import GPT, OTHERS, case
from random_plans import feature_pairs
from torch.utils import backend_registration

from trainwright import documents
from trainwright.plan import Plan
from trainwright.training import Training
from trainwright_worker.layers.custom_description import describe

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this release of torch has no device for tests",
    ),
]

WALK = Path(__file__).with_name("device_walk.py")
FAMILIES = {**GPT, **{name: model[name] for name, model in OTHERS.items()}}
PLANS_OF_EACH = 23


def candidate(family: str, given: dict, number: int, seed: int, *, devices: int = 8) -> dict:
    """Return a case with one or two micro-batches per pipeline, since all are alike here."""
    model = {**given, "dtype": ("float16", "bfloat16")[number % 2]}
    is_sequence_parallel = number // 2 % 2 == 0
    found = case(f"{family}-{number}", model, seed, devices, sequence_parallel=is_sequence_parallel)
    pipelines = found["plan"]["pipelines"]
    for pipeline in pipelines:
        pipeline["micro_batches"] = min(1 + number % 2, pipeline["micro_batches"])
    rows = sum(pipeline["micro_batches"] * pipeline["micro_batch_size"] for pipeline in pipelines)
    found["plan"]["global_batch_size"] = rows
    return found


CASES = [
    candidate(family, {family: given}, number, 7000 + 100 * place + number)
    for place, (family, given) in enumerate(FAMILIES.items())
    for number in range(PLANS_OF_EACH)
]


def pairs_of(one: dict) -> set[Hashable]:
    """Return every pair of features, with the family, number format and sequence parallelism, and those within a run."""
    (family,) = (key for key in one["model"] if key != "dtype")
    plan = documents.parse(one["plan"], Plan)
    is_sequence_parallel = plan.stages[0].layers[0].sequence_parallel
    return feature_pairs(plan, family, one["model"]["dtype"], f"sequence parallel {is_sequence_parallel}")


TOGETHER = (("gpt", "llama", "bert"), ("t5", "moe", "vit"), ("swin", "wide_resnet", "trans_gan"))
"""Families whose cases one process runs."""

QUICK = {one["name"] for one in covering(CASES, pairs_of)}


def test_quick_plans_are_forty_and_more_than_two_hundred_in_all_are_walked() -> None:
    assert len(QUICK) <= 40
    assert len(CASES) >= 200
    assert {one["model"]["dtype"] for one in CASES if one["name"] in QUICK} == {"float16", "bfloat16"}
    assert sorted(itertools.chain(*TOGETHER)) == sorted(FAMILIES)


@pytest.mark.parametrize(
    "is_quick", [pytest.param(True, id="quick"), pytest.param(False, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("families", TOGETHER, ids="-".join)
def test_every_rank_keeps_to_its_device(tmp_path: Path, families: tuple[str, ...], *, is_quick: bool) -> None:
    asked = [one for one in CASES if one["model"].keys() & set(families)]
    answers = answers_of(WALK, tmp_path, [one for one in asked if (one["name"] in QUICK) == is_quick])
    assert all(answer["steps"] > 0 for answer in answers.values())
    assert {name: answer["problems"] for name, answer in answers.items() if answer["problems"]} == {}


@pytest.mark.parametrize(
    "number", [pytest.param(0, id="resnet18", marks=pytest.mark.slow), pytest.param(1, id="distilbert")]
)
def test_every_rank_of_a_custom_model_keeps_to_its_device(tmp_path: Path, number: int) -> None:
    custom = describe(("outside_models:resnet18", "outside_models:distilbert")[number])
    given = {"custom": documents.dump(Training(1, custom=custom))["custom"]}
    cases = [candidate("custom", given, number, 7900 + number, devices=4)]
    answers = answers_of(WALK, tmp_path, cases)
    assert all(answer["steps"] > 0 for answer in answers.values())
    assert {name: answer["problems"] for name, answer in answers.items() if answer["problems"]} == {}
