"""First losses: one that nothing can be trained by ends the trial, and the report says what operators compare."""

from __future__ import annotations

import pytest
import torch

from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import LossDependence, TrialTask
from trainwright_worker.executor.forward_observer import ForwardObserver
from trainwright_worker.gang.rank_assignment import gang_devices
from trainwright_worker.model_description.description import describe

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(120)]


def model_of(name: str, dtype: Dtype = Dtype.FLOAT32, check_seconds: float = 0) -> Model:
    return Model.of(describe(f"loss_habits:{name}", check_seconds=check_seconds), dtype)


def tried(worker, make, name: str, *, rows: int = 4, stages: int = 1, check_seconds: float = 0):
    """Try a model of three layers for three iterations of four rows, in micro-batches of `rows`."""
    gang = make.gang(stages)
    devices, cuts = gang_devices(gang), (0, 2, 3) if stages == 2 else (0, 3)
    made = tuple(
        Stage((devices[place],), (LayerRun(cuts[place], cuts[place + 1] - cuts[place], Strategy(1, 1), (rows,)),))
        for place in range(stages)
    )
    plan = Plan(3, 4, (Pipeline(4 // rows, rows, made),))
    return worker.local(
        TrialTask(gang, model_of(name, check_seconds=check_seconds), plan, warmup_iterations=1, iterations=2)
    )


def test_first_loss_that_is_not_finite_ends_the_trial_and_names_the_layer(worker, make) -> None:
    outcome = tried(worker, make, "overflowing", stages=2)
    assert outcome.code != 0
    assert not outcome.reports
    assert "LossInvalid" in outcome.reasons
    words = next(one.message for one in outcome.failures if one.reason == "LossInvalid")
    assert "iteration 0, float32" in words
    assert "layer 1 (Overflow)" in words


def test_loss_that_is_exactly_0_for_rows_alone_ends_the_trial(worker, make) -> None:
    outcome = tried(worker, make, "contrasting", rows=1)
    assert outcome.reasons == {"LossInvalid"}
    assert "exactly 0" in outcome.failures[0].message
    assert "layer 2 (Contrast)" in outcome.failures[0].message


def test_loss_that_was_exactly_0_when_it_was_checked_is_no_reason_to_end_a_trial(worker, make) -> None:
    outcome = tried(worker, make, "hinged", check_seconds=60)
    assert outcome.code == 0, outcome.errors
    assert set(outcome.reports[0].losses) == {0.0}
    assert tried(worker, make, "hinged").reasons == {"LossInvalid"}


def test_later_loss_that_is_not_finite_is_a_remark(worker, make) -> None:
    outcome = tried(worker, make, "late")
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert report.losses[2] is None
    assert None not in report.losses[:2]
    assert report.mean_absolute_row_loss == pytest.approx(report.losses[0], rel=1e-5)
    assert report.remark == "1 of 3 iterations had a loss that is not finite, iteration 2 the first."


def observed(executor, name: str) -> tuple[ForwardObserver, float]:
    """Return what the first iteration of one of two replicas shows, and the loss of its rows."""
    made = executor(model_of(name), data=2)
    made.passes.observer = ForwardObserver(torch.device("cpu"))
    loss = made.run_iteration(made.make_batch(0))
    return made.passes.observer, loss * made.plan.global_batch_size


def test_absolute_losses_are_of_rows_whatever_their_signs(executor) -> None:
    observer, loss = observed(executor, "signed")
    assert float(observer.absolute_loss) > 1.2 * abs(loss)
    observer, loss = observed(executor, "plain")
    assert float(observer.absolute_loss) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "dependences"),
    [
        ("plain", set()),
        ("random", {LossDependence.RANDOM_NUMBERS}),
        ("normalised", {LossDependence.BATCH_NORMALISATION}),
    ],
)
def test_layers_that_draw_random_numbers_or_normalise_by_batch_are_seen(executor, name: str, dependences: set) -> None:
    observer, _ = observed(executor, name)
    assert observer.dependences == dependences
    assert observer.first_not_finite is None
