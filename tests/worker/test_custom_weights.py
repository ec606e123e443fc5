"""Losses of user models that are means over the tokens of a batch: equal to one process under every plan."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import two_device_plans
import weighted_models
from gang_answers import answers_of
from one_process import OneProcess
from torch import nn
from torch.nn import functional

from trainwright import documents
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright.training import Training
from trainwright.worker_api import TrialTask
from trainwright_worker.executor.optimizer import GradientScaling, LossScale
from trainwright_worker.gang.rank_assignment import gang_devices
from trainwright_worker.model_description.description import describe

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(300)]

EQUIVALENCE = Path(__file__).with_name("equivalence_gang.py")
LAYERS, ROWS, MICRO_BATCHES = 4, 4, 2
replicas = partial(two_device_plans.replicas, LAYERS, (1, 3), MICRO_BATCHES)
stages = partial(two_device_plans.stages, LAYERS, 2, ROWS, MICRO_BATCHES)
PLANS = {
    "replicas": replicas(),
    "zero1": replicas(sharding=Sharding.ZERO1),
    "zero2": replicas(sharding=Sharding.ZERO2),
    "zero3, recompute": replicas(sharding=Sharding.ZERO3, recompute=True),
    "stages": stages(),
    "stages, recompute": stages(recompute=True),
    "pipelines": two_device_plans.pipelines(LAYERS, 2, (3, 1)),
}


def document(name: str, **fields) -> dict:
    described = describe(f"weighted_models:{name}", check_seconds=0)
    return {"custom": documents.dump(Training(1, custom=described))["custom"], **fields}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cases = [
        {"name": plan, "model": document("tokens"), "plan": documents.dump(made), "steps": 3}
        for plan, made in PLANS.items()
    ]
    zero3 = documents.dump(PLANS["zero3, recompute"])
    cases += [
        {"name": "clipped", "model": document("tokens"), "plan": zero3, "steps": 3, "clip_norm": 0.05},
        {"name": "adam", "model": document("floats"), "plan": zero3, "steps": 3, "optimizer": "adam"},
        {"name": "bfloat16", "model": document("tokens", dtype="bfloat16"), "plan": zero3, "steps": 3},
        {"name": "float16", "model": document("tokens", dtype="float16"), "plan": zero3, "steps": 3},
    ]
    return answers_of(EQUIVALENCE, tmp_path_factory.mktemp("trained"), cases, processes=2)


@pytest.mark.parametrize("plan", [*PLANS, "clipped", "adam"])
def test_every_plan_trains_the_mean_over_the_tokens_of_the_batch(trained: dict, plan: str) -> None:
    answer = trained[plan]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-6
    assert answer["gradient_error"] < 1e-5
    assert answer["weight_error"] < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_formats_train_it_but_for_their_rounding(trained: dict, dtype: str) -> None:
    assert trained[dtype]["loss_error"] < 1e-2
    assert trained[dtype]["gradient_error"] < 5e-2


def test_the_reference_is_torchs_mean_over_targets_that_are_not_ignored() -> None:
    one = OneProcess(Model.of(describe("weighted_models:tokens", check_seconds=0)), seed=3)
    embedding, first, second, head = (layer.module for layer in one.layers)
    rows = weighted_models.rows(seed=3, iteration=0, first=0, count=8)
    logits = nn.Linear.forward(head, second(first(embedding(rows["tokens"]))))
    expected = functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten(), ignore_index=-100)
    torch.testing.assert_close(one.loss(0, 8), expected)


def test_a_batch_of_weight_0_updates_nothing_and_is_counted(executor) -> None:
    made = executor(Model.of(describe("weighted_models:empty", check_seconds=0), Dtype.FLOAT16))
    losses, weights = [], []
    for iteration in range(3):
        losses.append(made.run_iteration(made.make_batch(iteration)))
        weights.append(torch.cat([unit.master_shard.clone() for unit in made.stage.flat_parameters]))
    assert (made.empty_batches, made.skipped_updates, made.optimizer.updates) == (1, 0, 2)
    assert list(map(math.isnan, losses)) == [False, True, False]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert made.loss_scale.quiet_iterations == 2


def test_an_evaluation_is_the_mean_over_the_tokens_of_its_batch(executor) -> None:
    model = Model.of(describe("weighted_models:tokens", check_seconds=0))
    made, one = executor(model), OneProcess(model, seed=0)
    assert made.evaluate(made.make_batch(1)) == pytest.approx(one.loss(1, 8).item(), rel=1e-6)


def tried(worker, make, name: str):
    gang = make.gang(1)
    stage = Stage(gang_devices(gang), (LayerRun(0, LAYERS, Strategy(1, 1), (ROWS,)),))
    plan = Plan(LAYERS, MICRO_BATCHES * ROWS, (Pipeline(MICRO_BATCHES, ROWS, (stage,)),))
    model = Model.of(describe(f"weighted_models:{name}", check_seconds=0))
    outcome = worker.local(TrialTask(gang, model, plan, warmup_iterations=1, iterations=2))
    assert outcome.code == 0, outcome.errors
    return outcome.reports[0]


def test_a_trial_says_that_a_batch_weighed_nothing(worker, make) -> None:
    report = tried(worker, make, "empty")
    assert report.empty_batches == 1
    assert [loss is None for loss in report.losses] == [False, True, False]
    assert report.remark == (
        "1 of 3 iterations updated no weights and have no loss, since all rows of their batch have weight 0."
    )
    assert report.mean_absolute_row_loss == pytest.approx(report.losses[0], rel=1e-5)


def test_a_first_batch_that_weighs_nothing_is_compared_with_no_other(worker, make) -> None:
    report = tried(worker, make, "first_empty")
    assert report.empty_batches == 1
    assert report.mean_absolute_row_loss is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("with_gradient", r"layer 3 \(GradientHead\) returns weights of rows with a gradient"),
        ("negative", r"layer 3 \(NegativeHead\) returns weights of rows below 0"),
        ("mean", r"layer 3 \(MeanHead\) gives rows together other losses or gradients than each alone"),
        ("by_token", r"a weight for each row beside its losses, .* of shape \(2,\), got bool \(2, 6\)"),
    ],
)
def test_describe_refuses_weights_that_are_none(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        describe(f"weighted_models:{name}")


@pytest.mark.parametrize("name", ["tokens", "floats"])
def test_describe_accepts_counts_and_other_weights(name: str) -> None:
    checks = describe(f"weighted_models:{name}").checks
    assert checks is not None
    assert (checks.left_out, checks.remarks) == ((), ())


@pytest.mark.parametrize("limit", [None, 0.5])
def test_gradients_are_divided_by_the_weight_before_they_are_clipped(limit: float | None) -> None:
    norm, per_row = torch.tensor(64.0, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    scaling = GradientScaling.of(norm, 8.0, limit, per_row)
    assert float(scaling.divisor) == (32.0 if limit is None else 128.0)
    assert float(scaling.overflow) == 0.0


def test_a_loss_scale_adapts_from_that_of_the_mean() -> None:
    scale = LossScale(active=True)
    scale.update(overflowed=True, weight_per_row=1024.0)
    assert scale.factor == LossScale.INITIAL_FACTOR / 1024
    scale.update(overflowed=True, weight_per_row=1024.0)
    assert scale.factor == LossScale.INITIAL_FACTOR / 2048
