"""Boundaries of users' models between stages: they travel in the format that a layer returns, in the shapes of the probe."""

from __future__ import annotations

import pytest
import torch

from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import ProfilingTask, TrialTask
from trainwright_worker.gang.rank_assignment import gang_devices
from trainwright_worker.measure.layer_under_test import LayerUnderTest
from trainwright_worker.model_description.description import describe

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(120)]


def tried(worker, make, name: str, *runs: LayerRun, dtype: Dtype = Dtype.FLOAT32):
    """Try a model of three layers on four rows, in two micro-batches, with a stage for each run."""
    gang = make.gang(*(run.strategy.data for run in runs))
    devices, stages = list(gang_devices(gang)), []
    for run in runs:
        own, devices = devices[: run.strategy.data], devices[run.strategy.data :]
        stages.append(Stage(tuple(own), (run,)))
    plan = Plan(3, 8, (Pipeline(2, 4, tuple(stages)),))
    model = Model.of(describe(f"loss_habits:{name}", check_seconds=0), dtype)  # which refuses them
    return worker.local(TrialTask(gang, model, plan, warmup_iterations=1, iterations=2, track_memory=False))


def test_bfloat16_that_autocast_hands_on_reaches_the_next_stage(worker, make) -> None:
    """One sender has two receivers of one and three rows."""
    one = tried(worker, make, "autocasting", LayerRun(0, 3, Strategy(1, 1), (4,)))
    split = tried(
        worker, make, "autocasting", LayerRun(0, 1, Strategy(1, 1), (4,)), LayerRun(1, 2, Strategy(1, 2), (1, 3))
    )
    assert one.code == split.code == 0, one.errors + split.errors
    assert split.reports[0].losses == pytest.approx(one.reports[0].losses, rel=1e-2)
    assert split.reports[0].losses[0] == pytest.approx(one.reports[0].losses[0], rel=1e-5)


def test_integers_and_masks_pass_between_stages_as_in_one_process(worker, make) -> None:
    """One sender has two receivers of one and three rows; the second loss follows from the gradients of both stages."""
    one = tried(worker, make, "looking_up", LayerRun(0, 3, Strategy(1, 1), (4,)))
    split = tried(
        worker, make, "looking_up", LayerRun(0, 1, Strategy(1, 1), (4,)), LayerRun(1, 2, Strategy(1, 2), (1, 3))
    )
    late = tried(worker, make, "looking_up", LayerRun(0, 2, Strategy(1, 1), (4,)), LayerRun(2, 1, Strategy(1, 1), (4,)))
    assert one.code == split.code == late.code == 0, one.errors + split.errors + late.errors
    assert split.reports[0].losses == pytest.approx(one.reports[0].losses, rel=1e-5)
    assert late.reports[0].losses == pytest.approx(one.reports[0].losses, rel=1e-5)
    assert one.reports[0].losses[0] != pytest.approx(one.reports[0].losses[1], rel=1e-3)


@pytest.mark.parametrize(("name", "loss"), [("stepping", 1000.0), ("stepping_in_float32", 999.0)])
def test_fields_of_a_bfloat16_plan_stay_float32_where_the_model_says_so(worker, make, name: str, loss: float) -> None:
    runs = LayerRun(0, 2, Strategy(1, 1), (4,)), LayerRun(2, 1, Strategy(1, 1), (4,))
    outcome = tried(worker, make, name, *runs, dtype=Dtype.BFLOAT16)
    assert outcome.code == 0, outcome.errors
    assert set(outcome.reports[0].losses) == {loss}


def test_layers_are_profiled_with_the_fields_that_stay_float32(make) -> None:
    model = Model.of(describe("loss_habits:stepping_in_float32", check_seconds=0), Dtype.BFLOAT16)
    task = ProfilingTask(make.gang(1), model, 1, (2,), iterations=1)
    layer = LayerUnderTest.of(task, model.kinds[-1], 2, torch.device("cpu"), lambda _doing: None)
    assert layer.data["targets"].tolist() == [999.0, 999.0]
    assert layer.boundary[0].dtype is torch.bfloat16


def test_integers_are_counted_in_bytes() -> None:
    model = Model.of(describe("loss_habits:looking_up", check_seconds=0))
    words, mask = 3 * 8, 3
    assert [kind.output_bytes_per_row for kind in model.kinds] == [words + mask, 3 * 4, 0]
    assert model.output_bytes_per_row(0) == 8 * 4 + words + mask
    assert model.output_bytes_per_row(1) == 8 * 4 + 3 * 4


def test_layers_are_profiled_with_the_integers_that_they_are_given(make) -> None:
    """An embedding refuses any others."""
    model = Model.of(describe("loss_habits:looking_up", check_seconds=0))
    task = ProfilingTask(make.gang(1), model, 1, (1, 6), iterations=1)
    for kind, integers in zip(model.kinds, ((), (torch.int64, torch.bool), (torch.int32,)), strict=True):
        for rows in task.rows:
            layer = LayerUnderTest.of(task, kind, rows, torch.device("cpu"), lambda _doing: None)
            layer.backward(layer.forward())
            assert tuple(value.dtype for value in layer.boundary[1:]) == integers
            assert all(len(value) == rows for value in layer.boundary)


def test_float32_of_a_bfloat16_plan_reaches_the_next_stage_as_it_is(worker, make) -> None:
    """The stream has digits that bfloat16 rounds; the second loss follows from the gradients of both stages."""
    given = {"dtype": Dtype.BFLOAT16}
    one = tried(worker, make, "streaming", LayerRun(0, 3, Strategy(1, 1), (4,)), **given)
    split = tried(
        worker, make, "streaming", LayerRun(0, 1, Strategy(1, 1), (4,)), LayerRun(1, 2, Strategy(1, 2), (1, 3)), **given
    )
    late = tried(
        worker, make, "streaming", LayerRun(0, 2, Strategy(1, 1), (4,)), LayerRun(2, 1, Strategy(1, 1), (4,)), **given
    )
    assert one.code == split.code == late.code == 0, one.errors + split.errors + late.errors
    assert late.reports[0].losses == one.reports[0].losses
    assert split.reports[0].losses == pytest.approx(one.reports[0].losses, rel=1e-5)
    assert one.reports[0].losses[0] != pytest.approx(one.reports[0].losses[1], rel=1e-3)


def test_float32_of_half_plans_is_described_checked_and_priced() -> None:
    described = describe("loss_habits:streaming")
    assert described.checks is not None
    assert not described.checks.left_out + described.checks.remarks
    assert [kind.output_elements_per_row for kind in described.kinds] == [16, 16, 1]
    assert [kind.output_float32_elements_per_row for kind in described.kinds] == [8, 8, 0]
    sizes = {dtype: Model.of(described, dtype).output_bytes_per_row(1) for dtype in Dtype}
    assert sizes == {Dtype.FLOAT32: 16 * 4, Dtype.BFLOAT16: 8 * 4 + 8 * 2, Dtype.FLOAT16: 8 * 4 + 8 * 2}
    assert describe("loss_habits:plain", check_seconds=0).kinds[0].output_float32_elements_per_row == 0


def test_layers_are_profiled_with_the_float32_that_they_are_given(make) -> None:
    model = Model.of(describe("loss_habits:streaming", check_seconds=0), Dtype.FLOAT16)
    task = ProfilingTask(make.gang(1), model, 1, (2,), iterations=1)
    for kind, taken in zip(model.kinds, (0, 2, 2), strict=True):
        layer = LayerUnderTest.of(task, kind, 2, torch.device("cpu"), lambda _doing: None)
        output = layer.forward()
        assert [value.dtype for value in layer.boundary] == [torch.float32, torch.float16][:taken]
        assert [value.dtype for value in layer.gradients] == [value.dtype for value in output.boundary]
        layer.backward(output)


def test_a_layer_that_random_floats_fail_is_named_with_the_way_out(worker, make) -> None:
    """Its values were checked with those of the layer before."""
    model = Model.of(describe("loss_habits:looking_up_floats"))
    outcome = worker.local(ProfilingTask(make.gang(1), model, 1, (2,), iterations=1))
    (failure,) = outcome.failures
    assert failure.message.startswith(
        "node-a:0, timing LookUpFloats with 2 rows: entry point loss_habits:looking_up_floats: layer 1 (LookUpFloats) fails"
    )
    assert failure.message.endswith(
        "IndexError: index out of range in self; hand indices on as integers, or correct it"
    )


def test_boundary_whose_shape_changes_with_the_iteration_ends_the_trial_in_a_sentence(worker, make) -> None:
    outcome = tried(
        worker, make, "bucketed", LayerRun(0, 2, Strategy(1, 1), (4,)), LayerRun(2, 1, Strategy(1, 1), (4,))
    )
    assert outcome.code != 0
    (failure,) = (one for one in outcome.failures if one.reason == "Crashed")
    assert "layer 1 (Bucketed) returns tensors of shape (4, 7) for 4 rows, but (4, 8)" in failure.message
