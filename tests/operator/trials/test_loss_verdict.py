"""Verdict on the first losses of a plan's trials: a plan that trains another model than most cannot win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from flow_reports import report_of
from flow_world import World, spec_of

from trainwright.layer import Dtype
from trainwright.worker_api import LossDependence, TrialReport, TrialTask
from trainwright_operator.flow.trials.loss_verdict import LossVerdict


def report(loss: float, scale: float | None = None, depends_on: LossDependence | None = None) -> TrialReport:
    return TrialReport((1.0,), (loss, 1.0), mean_absolute_row_loss=scale or abs(loss), loss_depends_on=depends_on)


def judged(*losses: float, dtype: Dtype = Dtype.FLOAT32) -> LossVerdict:
    return LossVerdict.of({f"trial-{number}": (dtype, report(loss)) for number, loss in enumerate(losses)})


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [(Dtype.FLOAT32, 2.0001, 2.0003), (Dtype.BFLOAT16, 2.015, 2.03), (Dtype.FLOAT16, 2.015, 2.03)],
)
def test_losses_agree_within_the_bound_of_their_number_format(dtype: Dtype, near: float, far: float) -> None:
    assert not judged(2.0, near, 2.0, dtype=dtype).differing
    verdict = judged(2.0, far, 2.0, dtype=dtype)
    assert set(verdict.differing) == {"trial-1"}
    assert f"first loss is {far:.6g}, elsewhere 2 (2 of 3 trials in {dtype} agree)" in verdict.differing["trial-1"]


def test_bound_is_a_share_of_the_absolute_losses_of_rows() -> None:
    """Losses of either sign may have a mean near 0."""
    losses = {"a": (Dtype.FLOAT32, report(1e-6, 2.0)), "b": (Dtype.FLOAT32, report(-1e-6, 2.0))}
    assert not LossVerdict.of(losses).differing


@pytest.mark.parametrize("losses", [(2.0, 3.0), (2.0, 3.0, 4.0), (2.0, 2.0, 3.0, 3.0)])
def test_none_counts_where_no_more_than_half_agree(losses: tuple[float, ...]) -> None:
    assert len(judged(*losses).differing) == len(losses)


def test_one_trial_alone_and_none_at_all_are_not_judged() -> None:
    assert judged(2.0) == judged() == LossVerdict({})


def test_formats_are_judged_one_by_one() -> None:
    verdict = LossVerdict.of({"a": (Dtype.FLOAT32, report(2.0)), "b": (Dtype.FLOAT16, report(3.0))})
    assert not verdict.differing


def test_trials_whose_loss_depends_on_the_plan_are_left_out_in_words() -> None:
    random = report(5.0, depends_on=LossDependence.RANDOM_NUMBERS)
    verdict = LossVerdict.of(
        {"a": (Dtype.FLOAT32, report(2.0)), "b": (Dtype.FLOAT32, random), "c": (Dtype.FLOAT32, report(2.0))}
    )
    assert not verdict.differing
    assert verdict.remark == "first losses are not compared where a layer draws random numbers (b)"


def test_reports_of_former_versions_are_not_compared() -> None:
    former = TrialReport((1.0,), (9.0, 1.0))
    assert LossVerdict.of({"a": (Dtype.FLOAT32, report(2.0)), "b": (Dtype.FLOAT32, former)}) == LossVerdict({})


def world_with(changed: Callable[[int, TrialReport], TrialReport], **spec: Any) -> World:
    """Return a world in which each trial's report is changed by its number in the order of the runs."""
    runs: list[TrialTask] = []

    def reported(task: Any) -> Any:
        made = report_of(task)
        if not isinstance(task, TrialTask):
            return made
        if task not in runs:
            runs.append(task)
        return changed(runs.index(task), made)

    return World(report=reported, spec=spec_of(**spec))


def lost(number: int, made: TrialReport, loss: float) -> TrialReport:
    """Return the report with another first loss, and faster than all others."""
    return replace(made, losses=(loss, 0.5, 0.5), mean_absolute_row_loss=loss, iteration_seconds=(0.1 + number,))


def test_fastest_trial_of_another_loss_cannot_win_and_is_not_repeated() -> None:
    world = world_with(lambda number, made: lost(number, made, 1.5) if number == 0 else made)
    status = world.run()
    assert world.succeeded == "True"
    first, *others = status.trials
    assert (first.state, first.reason) == ("Void", "LossDiffers")
    assert "the first loss is 1.5, elsewhere 2 (4 of 5 trials in float32 agree)" in first.message
    assert first.measured_seconds == 0.1
    assert {trial.state for trial in others} == {"Succeeded"}
    assert status.winner.trial != first.name
    condition = world.condition("TrialsCompleted")
    assert condition.reason == "AllTrialsFinished"
    assert condition.message == (
        "5 of 5 trials were measured; the first loss of candidate-1 differs, so it does not count"
    )
    assert len({job.gang for job in world.jobs.values()}) <= 1
    assert world.decide() == []


def test_plan_fails_where_no_more_than_half_of_the_trials_agree() -> None:
    world = world_with(lambda number, made: lost(number, made, 1.0 + number))
    status = world.run()
    assert (world.succeeded, status.winner) == ("False", None)
    condition = world.condition("TrialsCompleted")
    assert (condition.status, condition.reason) == ("False", "LossesDisagree")
    assert "so none wins: candidate-1: the first loss is 1, elsewhere 2, 3, 4, 5" in condition.message
    assert {trial.reason for trial in status.trials} == {"LossDiffers"}


def test_verdict_counts_as_no_failure() -> None:
    """One failure would end the trials with `maxFailed: 0`."""
    world = world_with(lambda number, made: lost(number, made, 1.5) if number == 0 else made, trials={"maxFailed": 0})
    status = world.run()
    assert [trial.state for trial in status.trials] == ["Void", *["Succeeded"] * 4]
    assert world.succeeded == "True"


def test_winner_of_trials_that_draw_random_numbers_says_that_losses_were_not_compared() -> None:
    random = LossDependence.RANDOM_NUMBERS
    world = world_with(lambda number, made: replace(lost(number, made, 1.0 + number), loss_depends_on=random))
    world.run()
    assert world.succeeded == "True"
    assert "first losses are not compared where a layer draws random numbers (candidate-1, " in (
        world.condition("TrialsCompleted").message
    )
