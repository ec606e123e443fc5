"""Dicts of tensors between a user's layers: trained as in one process, sent in their formats, refused in a sentence."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import two_device_plans
from gang_answers import answers_of

from trainwright import documents
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright.training import Training
from trainwright.worker_api import ProfilingTask, TrialTask
from trainwright_worker.gang.rank_assignment import gang_devices
from trainwright_worker.layers.custom_boundaries import HandedOn
from trainwright_worker.measure.layer_under_test import LayerUnderTest
from trainwright_worker.model_description.description import describe

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(300)]

EQUIVALENCE = Path(__file__).with_name("equivalence_gang.py")
LAYERS, ROWS, MICRO_BATCHES = 6, 4, 3
replicas = partial(two_device_plans.replicas, LAYERS, (1, 3), MICRO_BATCHES)
stages = partial(two_device_plans.stages, LAYERS, rows=ROWS, micro_batches=MICRO_BATCHES)
PLANS = {
    "replicas, recompute": replicas(recompute=True),
    "zero3, recompute": replicas(sharding=Sharding.ZERO3, recompute=True),
    "stages of 1 and 5": stages(1),
    "stages of 3 and 3, recompute": stages(3, recompute=True),
    "stages of 5 and 1": stages(5),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    described = describe("keyed_models:keyed", check_seconds=0)
    model = {"custom": documents.dump(Training(1, custom=described))["custom"]}
    cases = [{"name": plan, "model": model, "plan": documents.dump(made), "steps": 3} for plan, made in PLANS.items()]
    cases += [
        {"name": f"bfloat16, {plan}", "model": {**model, "dtype": "bfloat16"}, "plan": documents.dump(PLANS[plan])}
        for plan in ("replicas, recompute", "stages of 1 and 5", "stages of 3 and 3, recompute")
    ]  # fmt: skip
    return answers_of(EQUIVALENCE, tmp_path_factory.mktemp("trained"), cases, processes=2)


@pytest.mark.parametrize("plan", PLANS)
def test_dicts_between_layers_train_as_one_process_does(trained: dict, plan: str) -> None:
    answer = trained[plan]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5
    assert answer["weight_error"] < 1e-4


def test_their_tensors_travel_in_their_own_formats(trained: dict) -> None:
    """Other stages differ from one by bfloat16's rounding of gradients alone."""
    whole = trained["bfloat16, replicas, recompute"]["losses"]
    for plan in ("stages of 1 and 5", "stages of 3 and 3, recompute"):
        assert trained[f"bfloat16, {plan}"]["losses"] == pytest.approx(whole, rel=1e-3)


def test_boundaries_do_not_depend_on_the_order_of_keys() -> None:
    """The order of a set differs between processes."""
    tensors = dict(zip("bca", torch.arange(3), strict=True))
    handed_on = HandedOn.of((torch.ones(()), tensors))
    flat = handed_on.flatten((torch.ones(()), {key: tensors[key] for key in "abc"}), "layer")
    assert [int(tensor) for tensor in flat] == [1, 2, 0, 1]
    one, keyed = handed_on.arguments(flat)
    assert int(one) == 1
    assert list(keyed.items()) == list(tensors.items())


def test_they_are_described_checked_and_priced_in_bytes() -> None:
    described = describe("keyed_models:keyed")
    assert described.checks is not None
    assert not described.checks.left_out + described.checks.remarks
    hidden, words, mask, lengths = 5 * 8, 5 * 8, 5, 4
    assert [kind.output_elements_per_row for kind in described.kinds] == [2 * hidden] * 5 + [1]
    assert [kind.output_float32_elements_per_row for kind in described.kinds] == [hidden] * 5 + [0]
    assert [kind.output_bytes_per_row for kind in described.kinds] == [words + mask + lengths] * 5 + [0]
    sizes = {dtype: Model.of(described, dtype).output_bytes_per_row(0) for dtype in Dtype}
    half = words + mask + lengths + 6 * hidden
    assert sizes == {Dtype.FLOAT32: half + 2 * hidden, Dtype.BFLOAT16: half, Dtype.FLOAT16: half}


def test_layers_are_profiled_with_the_dicts_that_they_are_given(make) -> None:
    model = Model.of(describe("keyed_models:keyed", check_seconds=0))
    task = ProfilingTask(make.gang(1), model, 1, (1, 6), iterations=1)
    for kind in model.kinds:
        for rows in task.rows:
            layer = LayerUnderTest.of(task, kind, rows, torch.device("cpu"), lambda _doing: None)
            layer.backward(layer.forward())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nested", r"layer 1 must return .*, or dicts of such tensors, got dict"),
        ("listed", r"layer 1 must return .*, or dicts of such tensors, got list"),
        ("without", r"layer 1 must return .*, or dicts of such tensors, got NoneType"),
        ("numbered", r"layer 1 returns a dict with the key 0; give its tensors names"),
    ],
)
def test_other_values_are_refused(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        describe(f"keyed_models:{name}", check_seconds=0)


def test_other_keys_than_those_of_the_probe_end_the_trial_in_a_sentence(worker, make) -> None:
    gang = make.gang(2)
    runs = LayerRun(0, 2, Strategy(1, 1), (4,)), LayerRun(2, 1, Strategy(1, 1), (4,))
    made = (Stage((device,), (run,)) for device, run in zip(gang_devices(gang), runs, strict=True))
    plan = Plan(3, 8, (Pipeline(2, 4, tuple(made)),))
    model = Model.of(describe("keyed_models:renamed", check_seconds=0))
    outcome = worker.local(TrialTask(gang, model, plan, warmup_iterations=1, iterations=2, track_memory=False))
    assert outcome.code != 0
    (failure,) = (one for one in outcome.failures if one.reason == "Crashed")
    assert (
        "layer 1 (Renamed) hands on ({words, hidden, mask, lengths, stream, extra}), but "
        "({words, hidden, mask, lengths, stream}) when it was probed"
    ) in failure.message
