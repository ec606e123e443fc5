"""Placement on the device: no rank of a plan mixes tensors of the device with tensors of the CPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gang_answers import answers_of
from nightly import covering
from plan_cases import GPT, OTHERS, model_of, plan_of
from random_plans import feature_pairs, in_sequence_parallel
from torch.utils import backend_registration

from trainwright import documents
from trainwright.plan import Plan, Schedule
from trainwright.training import Training
from trainwright_worker.model_description.description import describe

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this release of torch has no device for tests",
    ),
]

WALK = Path(__file__).with_name("device_walk.py")
LAYERS = {"gpt": 2, "llama": 1, "bert": 1, "t5": 1, "moe": 2, "vit": 1, "swin": [1, 1]}
"""Layers besides the first and the last ones: few, since a layer of a kind is placed like the others."""
FAMILIES = {
    name: {**fields, "layers": LAYERS[name]} if name in LAYERS else fields
    for name, fields in {**GPT, **{name: model[name] for name, model in OTHERS.items()}}.items()
}
PLANS_OF_EACH = 23
SEEDS_OF_EACH = {**dict.fromkeys(FAMILIES, 250), "gpt": 2000}
"""Plans that the quick ones are chosen from: more of GPT, since a tensor degree of 8 is its alone, and rare."""

TOGETHER = (("gpt", "llama"), ("bert", "moe", "vit"), ("t5", "trans_gan"), ("swin", "wide_resnet"))
"""Families whose cases one process runs, which profiles a kind of layer once."""


@dataclass(frozen=True)
class Candidate:
    """A random plan of a model, and what varies with its number."""

    family: str
    given: dict[str, Any]
    number: int
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.family}-{self.number}"

    @property
    def dtype(self) -> str:
        return ("float16", "bfloat16")[self.number % 2]

    @property
    def is_sequence_parallel(self) -> bool:
        return self.number // 2 % 2 == 0

    @property
    def walked_plan(self) -> Plan:
        """The plan with one micro-batch per pipeline, or up to two in one of five plans, since all are alike here."""
        most = 2 if self.number % 5 == 2 else 1
        plan = in_sequence_parallel(self.plan) if self.is_sequence_parallel else self.plan
        pipelines = tuple(replace(one, micro_batches=min(most, one.micro_batches)) for one in plan.pipelines)
        rows = sum(one.micro_batches * one.micro_batch_size for one in pipelines)
        return replace(plan, pipelines=pipelines, global_batch_size=rows)

    @property
    def layer_passes(self) -> int:
        """Layers of all ranks times their micro-batches and what else a rank does with them, about as long as two."""
        return sum(
            len(stage.devices) * run.count * (2 + pipeline.micro_batches)
            for pipeline in self.walked_plan.pipelines
            for stage in pipeline.stages
            for run in stage.layers
        )

    @property
    def case(self) -> dict[str, Any]:
        """The case of `device_walk.py`."""
        plan = json.loads(documents.dumps(self.walked_plan))
        return {"name": self.name, "plan": plan, "model": {**self.given, "dtype": self.dtype}}

    @property
    def case_of_ends(self) -> dict[str, Any]:
        """The case of the first and the last rank of every stage: those between them run the same code."""
        return {**self.case, "ends_only": True}

    def pairs(self) -> set[Hashable]:
        """Return every pair of features, family, number format and sequence parallelism, and those within a run.

        Several micro-batches, which pass from stage to stage, are combined with the schedule alone.
        """
        found = feature_pairs(self.plan, self.family, self.dtype, f"sequence parallel {self.is_sequence_parallel}")
        if any(one.micro_batches > 1 and len(one.stages) > 1 for one in self.walked_plan.pipelines):
            found.add(("several micro-batches", self.plan.schedule.value))
        return found


@cache
def candidates() -> list[Candidate]:
    """Return the plans that the quick ones are chosen from, those with least work first."""
    models = {family: model_of({family: fields}) for family, fields in FAMILIES.items()}
    found = [
        Candidate(family, {family: fields}, number, plan_of(models[family], 7000 + 10_000 * place + number))
        for place, (family, fields) in enumerate(FAMILIES.items())
        for number in range(SEEDS_OF_EACH[family])
    ]
    return sorted(found, key=lambda one: one.layer_passes)


@cache
def quick_plans() -> list[Candidate]:
    """Return plans that have every pair of features that the candidates have."""
    return covering(candidates(), Candidate.pairs)


@cache
def nightly_plans() -> list[Candidate]:
    """Return the quick plans, and the first of every family."""
    quick = {one.name for one in quick_plans()}
    return [one for one in candidates() if one.number < PLANS_OF_EACH or one.name in quick]


def custom(name: str) -> Candidate:
    """Return a plan of one of the user models."""
    family = describe(f"outside_models:{name}", check_seconds=0)
    given = {"custom": documents.dump(Training(1, custom=family))["custom"]}
    number = ("resnet18", "distilbert").index(name)
    return Candidate("custom", given, number, plan_of(model_of(given), 7900 + number, devices=4))


def require_no_problems(folder: Path, asked: list[dict[str, Any]]) -> None:
    answers = answers_of(WALK, folder, asked)
    assert answers.keys() == {one["name"] for one in asked}
    assert all(answer["steps"] > 0 for answer in answers.values())
    assert {name: answer["problems"] for name, answer in answers.items() if answer["problems"]} == {}


def test_quick_plans_cover_every_pair_of_features() -> None:
    every = set().union(*(one.pairs() for one in candidates()))
    assert set().union(*(one.pairs() for one in quick_plans())) == every
    assert {("gpt", "tensor degree 8"), ("float16", "tensor degree 8"), ("bfloat16", "tensor degree 8")} <= every
    assert {("several micro-batches", schedule.value) for schedule in Schedule} <= every
    assert len(quick_plans()) <= 40


def test_more_than_two_hundred_plans_of_every_family_are_walked_nightly() -> None:
    assert len(nightly_plans()) >= 200
    assert {one.name for one in quick_plans()} <= {one.name for one in nightly_plans()}
    assert sorted(itertools.chain(*TOGETHER)) == sorted(FAMILIES)


@pytest.mark.parametrize("families", TOGETHER, ids="-".join)
def test_first_and_last_rank_of_stages_of_quick_plans_keep_to_their_device(
    tmp_path: Path, families: tuple[str, ...]
) -> None:
    users = [custom("distilbert")] if "gpt" in families else []
    asked = [*(one for one in quick_plans() if one.family in families), *users]
    require_no_problems(tmp_path, [one.case_of_ends for one in asked])


@pytest.mark.slow
@pytest.mark.parametrize("families", TOGETHER, ids="-".join)
def test_every_rank_of_many_plans_keeps_to_its_device(tmp_path: Path, families: tuple[str, ...]) -> None:
    require_no_problems(tmp_path, [one.case for one in nightly_plans() if one.family in families])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["distilbert", "resnet18"])
def test_every_rank_of_a_custom_model_keeps_to_its_device(tmp_path: Path, model: str) -> None:
    require_no_problems(tmp_path, [custom(model).case])
