"""Figures of `make bench-trainers`: ratio of seconds, error of losses, order of plans."""

from __future__ import annotations

import pytest

from trainers.comparison import TrainerComparison, rank_correlation
from trainers.plans import MODELS, ROWS, UniformPlan


def compared(our_seconds, torch_seconds, our_losses=(1.0,), torch_losses=(1.0,)):
    return TrainerComparison("GPT", "2 replicas", 2, our_losses, torch_losses, our_seconds, torch_seconds)


def test_ratio_is_that_of_rounds_so_load_that_meets_both_trainers_cancels():
    assert compared((1.0, 4.0, 9.0), (2.0, 8.0, 6.0)).ratio == pytest.approx(0.5)


def test_loss_error_is_the_largest_of_all_iterations():
    assert compared((1.0,), (1.0,), (2.0, 1.0), (2.0, 1.25)).loss_error == pytest.approx(0.2)


def test_plans_in_the_same_order_correlate_fully():
    plans = [compared((ours,), (theirs,)) for ours, theirs in ((1.0, 5.0), (2.0, 6.0), (3.0, 9.0))]
    assert rank_correlation(plans) == pytest.approx(1)
    assert rank_correlation(plans[:2]) is None


@pytest.mark.parametrize(("stages", "data"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_uniform_plans_compute_the_same_batch(stages, data):
    for model in MODELS.values():
        plan = UniformPlan(stages, data).plan(model)
        (pipeline,) = plan.pipelines
        assert plan.global_batch_size == pipeline.micro_batches * pipeline.micro_batch_size == ROWS
        assert len(plan.devices) == stages * data
