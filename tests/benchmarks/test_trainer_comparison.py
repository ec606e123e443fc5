"""Figures of `make bench-trainers`: ratio of seconds, error of losses, order of plans."""

from __future__ import annotations

import csv

import pytest

from trainers.comparison import TrainerComparison, keep, rank_correlation
from trainers.plans import MODELS, PLANS, ROWS


def compared(our_seconds, their_seconds, our_losses=(1.0,), their_losses=(1.0,), *, trainer="torch", processes=2):
    return TrainerComparison(
        trainer, "GPT", "2 replicas", processes, our_losses, their_losses, our_seconds, their_seconds
    )


def test_ratio_is_that_of_rounds_so_load_that_meets_both_trainers_cancels():
    assert compared((1.0, 4.0, 9.0), (2.0, 8.0, 6.0)).ratio == pytest.approx(0.5)


def test_loss_error_is_the_largest_of_all_iterations():
    assert compared((1.0,), (1.0,), (2.0, 1.0), (2.0, 1.25)).loss_error == pytest.approx(0.2)


def test_plans_in_the_same_order_correlate_fully():
    plans = [compared((ours,), (theirs,)) for ours, theirs in ((1.0, 5.0), (2.0, 6.0), (3.0, 9.0))]
    assert rank_correlation(plans) == pytest.approx(1)
    assert rank_correlation(plans[:2]) is None


def test_lines_of_other_trainers_and_processes_are_kept(tmp_path):
    file = tmp_path / "trainers.csv"
    file.write_text("trainer,processes\n", encoding="utf-8")
    seconds = ((1.0,), (2.0,))
    keep([compared(*seconds), compared(*seconds, processes=4)], file)
    keep([compared(*seconds, trainer="torchtitan")], file)
    keep([compared((4.0,), (2.0,))], file)
    with file.open(encoding="utf-8") as lines:
        found = [(line["trainer"], line["processes"], line["ratio"]) for line in csv.DictReader(lines)]
    assert found == [("torch", "2", "2.0000"), ("torch", "4", "0.5000"), ("torchtitan", "2", "0.5000")]


PLANS_ONCE = {str(plan): plan for plans in PLANS.values() for plan in plans}


@pytest.mark.parametrize("name", PLANS_ONCE)
def test_uniform_plans_compute_the_same_batch_on_all_devices(name):
    uniform = PLANS_ONCE[name]
    for model in MODELS.values():
        plan = uniform.plan(model)
        (pipeline,) = plan.pipelines
        assert plan.global_batch_size == pipeline.micro_batches * pipeline.micro_batch_size == ROWS
        assert len(plan.devices) == uniform.processes
        assert model.max_tensor_degree % uniform.tensor == 0
