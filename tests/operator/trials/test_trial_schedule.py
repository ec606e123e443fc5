"""Choice of the next candidate to try, and when the others are not worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_reports import report_of
from flow_world import World, spec_of
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright import documents
from trainwright.trial_selection import ModelUncertainty, Rule, TrialPosterior, propose
from trainwright.worker_api import TrialReport
from trainwright_operator.flow.documents.planned_trials import PlannedTrials, Role
from trainwright_operator.flow.trials.trial_schedule import TrialResult, next_trials

BELOW = 0.01
NEVER = 1e-9


@pytest.fixture(scope="module")
def planned() -> PlannedTrials:
    """Return eight candidates and two baselines, as a search leaves them."""
    world = World(spec=spec_of(trials={"topK": 8}))
    world.run(until=lambda: world.status.candidates_ref is not None)
    stored = world.stored[world.status.candidates_ref.config_map]
    found: PlannedTrials = documents.loads(stored.data["document.json"], PlannedTrials)
    return found


def names(made) -> list[str]:
    return [turn.trial.name for turn in made]


def roles(made) -> list[Role]:
    return [turn.trial.role for turn in made]


def measured(planned: PlannedTrials, made: list[str]) -> dict[str, TrialResult]:
    """Return results equal to the predictions."""
    return {trial.name: TrialResult(trial.predicted_seconds) for trial in planned.trials if trial.name in made}


def test_search_returns_the_uncertainty_of_its_predictions(planned: PlannedTrials) -> None:
    count = len(planned.trials)
    assert [len(row) for row in planned.uncertainty.covariance] == [count] * count
    assert len(planned.uncertainty.memory_shares) == count
    assert documents.loads(documents.dumps(planned), PlannedTrials) == planned


def test_trials_keep_document_order_without_a_threshold_or_uncertainty(planned: PlannedTrials) -> None:
    former = replace(planned, uncertainty=None)
    tried = measured(planned, [trial.name for trial in planned.trials])
    for made in (next_trials(planned, tried, None), next_trials(former, tried, BELOW)):
        assert names(made) == [trial.name for trial in planned.trials]
        assert all(turn.is_worth_it for turn in made)


def test_trials_keep_document_order_before_any_result(planned: PlannedTrials) -> None:
    assert names(next_trials(planned, {}, BELOW)) == [trial.name for trial in planned.trials]


def test_every_trial_runs_once_and_baselines_keep_their_position(planned: PlannedTrials) -> None:
    tried: dict[str, TrialResult] = {}
    for _ in planned.trials:
        made = next_trials(planned, tried, NEVER)
        assert sorted(names(made)) == sorted(trial.name for trial in planned.trials)
        assert roles(made) == [trial.role for trial in planned.trials]
        following = next(turn.trial for turn in made if turn.trial.name not in tried)
        tried[following.name] = TrialResult(following.predicted_seconds * (1.3 if len(tried) % 2 else 0.9))


def test_chosen_trial_is_chosen_again_after_its_result(planned: PlannedTrials) -> None:
    tried: dict[str, TrialResult] = {}
    order: list[str] = []
    for number in range(len(planned.trials)):
        made = next_trials(planned, tried, NEVER)
        assert names(made)[:number] == order
        order.append(names(made)[number])
        tried[order[-1]] = TrialResult(1.0 + 0.01 * (number % 3))


@examples(30)
@given(data=st.data())
def test_trials_run_out_of_order_count_before_the_next_choice(planned: PlannedTrials, data) -> None:
    """Cover several trials of one gang too."""
    candidates = [trial for trial in planned.trials if trial.role is Role.CANDIDATE]
    some = data.draw(st.lists(st.sampled_from(candidates), unique_by=lambda trial: trial.name, max_size=7))
    off = data.draw(st.lists(st.floats(0.7, 1.4), min_size=len(some), max_size=len(some)))
    tried = {trial.name: TrialResult(trial.predicted_seconds * ratio) for trial, ratio in zip(some, off, strict=True)}
    made = [turn for turn in next_trials(planned, tried, NEVER) if turn.trial.role is Role.CANDIDATE]
    assert names(made)[: len(tried)] == list(tried)
    following = propose(known_after(planned, tried), Rule(NEVER, least_gain=0.0), among=untried(planned, tried)).trial
    assert made[len(tried)].is_worth_it == (following is not None)
    if following is not None:
        assert made[len(tried)].trial == planned.trials[following]


def known_after(planned: PlannedTrials, tried: dict[str, TrialResult]) -> TrialPosterior:
    seconds = [trial.predicted_seconds for trial in planned.trials]
    known = TrialPosterior.before_trials(seconds, planned.uncertainty.covariance, planned.uncertainty.memory_shares)
    numbers = {trial.name: number for number, trial in enumerate(planned.trials)}
    for name, result in tried.items():
        known = known.after_seconds(numbers[name], result.seconds)
    return known


def untried(planned: PlannedTrials, tried: dict[str, TrialResult]) -> list[int]:
    return [
        number
        for number, trial in enumerate(planned.trials)
        if trial.role is Role.CANDIDATE and trial.name not in tried
    ]


def test_only_baselines_remain_when_the_best_candidate_is_clear(planned: PlannedTrials) -> None:
    first = planned.trials[0]
    ended = [first.name, *(trial.name for trial in planned.trials if trial.role is Role.BASELINE)]
    made = next_trials(planned, measured(planned, ended), 0.5)
    assert all(turn.is_worth_it for turn in made if turn.trial.role is Role.BASELINE or turn.trial is first)
    assert not [
        turn for turn in made if turn.is_worth_it and turn.trial.role is Role.CANDIDATE and turn.trial is not first
    ]


def test_faster_plan_that_may_not_fit_is_less_worth_it_where_another_trainer_runs_it(planned: PlannedTrials) -> None:
    slow, fast = [trial for trial in planned.trials if trial.role is Role.CANDIDATE][:2]
    small = replace(slow, predicted_seconds=1.02), replace(fast, predicted_seconds=1.0)
    uncertainty = replace(planned.uncertainty, covariance=((1e-8, 0.0), (0.0, 1e-8)), memory_shares=(0.3, 0.93))
    two = replace(planned, trials=small, uncertainty=uncertainty)
    for doubts, worth in ((None, True), (ModelUncertainty.of_other_trainers(), False)):
        turns = next_trials(two, {slow.name: TrialResult(1.02)}, 0.0155, doubts)
        assert [turn.is_worth_it for turn in turns if turn.trial.name == fast.name] == [worth]


def test_failed_first_trial_does_not_end_the_trials(planned: PlannedTrials) -> None:
    for lacking in (True, False):
        made = next_trials(planned, {planned.trials[0].name: TrialResult(None, out_of_memory=lacking)}, 0.5)
        assert [turn.is_worth_it for turn in made] == [True] * len(made)


def test_plan_stops_early_with_the_regret_reason() -> None:
    world = World(spec=spec_of(trials={"topK": 8, "stopWhenRegretBelow": 0.2}))
    status = world.run()
    assert world.succeeded == "True"
    condition = world.condition("TrialsCompleted")
    assert (condition.status, condition.reason) == ("True", "RegretIsSmall")
    assert "trials.stopWhenRegretBelow 0.2" in condition.message
    states = {trial.name: (trial.state, trial.reason) for trial in status.trials}
    skipped = [name for name, (state, reason) in states.items() if (state, reason) == ("Skipped", "RegretIsSmall")]
    assert skipped
    assert all(name.startswith("candidate-") for name in skipped)
    assert all(states[f"baseline-{rank}"][0] == "Succeeded" for rank in (1, 2) if f"baseline-{rank}" in states)
    assert status.winner.speedup_over_baseline is not None


def test_tiny_threshold_keeps_the_winner() -> None:
    def slow_pipelines(order):
        found = report_of(order)
        if not isinstance(found, TrialReport):
            return found
        seconds = 2.0 + sum(len(stage.devices) * number for number, stage in enumerate(order.plan.pipelines[0].stages))
        return replace(found, iteration_seconds=(seconds, seconds))

    plain = World(spec=spec_of(trials={"topK": 4}), report=slow_pipelines).run()
    chosen = World(spec=spec_of(trials={"topK": 4, "stopWhenRegretBelow": NEVER}), report=slow_pipelines).run()
    assert chosen.winner.measured_seconds == plain.winner.measured_seconds
    assert {trial.name for trial in chosen.trials} == {trial.name for trial in plain.trials}


def test_threshold_set_later_repeats_no_measurement() -> None:
    world = World(spec=spec_of(trials={"topK": 8}))
    world.run(until=lambda: any(name.endswith("-candidate-1-result") for name in world.stored))
    world.change(trials={"topK": 8, "stopWhenRegretBelow": 0.2})
    before = len(world.created)
    status = world.run()
    assert not [
        name for name in world.created[before:] if "profile" in name or "links" in name or "candidate-1-" in name
    ]
    assert status.trials[0].state == "Succeeded"
    assert world.condition("TrialsCompleted").reason == "RegretIsSmall"
