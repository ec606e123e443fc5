"""Candidates of a real search, simulated truths, and the command that proposes the next trial."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from quick_planner import quickly
from trial_oracle import Error, proposed, run_by_measurement, true_seconds
from trial_oracle import run as try_out
from typer.testing import CliRunner

from trainwright import documents
from trainwright.calibration import DeviceMemory, FailedTrial, Trial, Trials, fit
from trainwright.cli import app
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan
from trainwright.search import run
from trainwright.strategy import Sharding
from trainwright.trial_selection import ModelUncertainty, StoppingDecision, TrialHistory, propose

TRUTHS, TRIALS = 30, 4
CANDIDATES = 24
MARGIN = 0.7
"""Of regrets; these thirty truths give a fifth, others up to a half."""


@pytest.fixture(scope="module")
def problem(make_problem, make_cluster):
    """Problem of two node types with links slow enough to matter."""
    return make_problem(make_cluster(between=8e6), batch=32)


@pytest.fixture(scope="module")
def plans(problem):
    return [candidate.plan for candidate in run("amp", problem, top=CANDIDATES)]


@pytest.fixture(scope="module")
def study(problem, plans):
    return TrialHistory.of(plans, problem.cost_context)


def seconds_of(plan, problem, **changes):
    runtime = replace(problem.runtime, **changes)
    return estimate_with_context(plan, replace(problem.cost_context, runtime=runtime)).iteration_seconds


def test_factors_change_predictions_as_the_cost_model_does(problem, plans, study):
    column = study.loadings.values[:, study.loadings.names.index("bandwidth of links")]
    faster = [seconds_of(plan, problem, link_ratio=exp(ModelUncertainty().link)) for plan in plans]
    moved = [log(after / before.iteration_seconds) for after, before in zip(faster, study.estimates, strict=True)]
    np.testing.assert_allclose(column, moved, atol=0.03)
    assert column.min() < -0.03  # some plans send a lot …
    assert column.max() > column.min() / 3  # … and some little


def test_before_any_trial_the_error_is_expected_to_be_5_to_25_per_cent(study):
    assert study.prior.seconds.deviations.min() > 0.05
    assert study.prior.seconds.deviations.max() < 0.25


def test_trials_identify_the_wrong_factor_and_correct_untried_plans(problem, plans, study):
    truth = {plan: seconds_of(plan, problem, link_ratio=0.7) for plan in plans}
    sending = sorted(
        range(len(plans)),
        key=lambda plan: study.loadings.values[plan, study.loadings.names.index("bandwidth of links")],
    )
    tried = [*sending[:3], *sending[-3:]]
    learnt = TrialHistory.of(
        plans, problem.cost_context, Trials(tuple(Trial(plans[plan], truth[plans[plan]]) for plan in tried))
    )

    factors = {factor.name: factor for factor in learnt.factor_observations}
    links = factors["bandwidth of links"]
    assert links.share == pytest.approx(-0.3, abs=2 * links.deviation)
    assert links.share < -0.15
    assert links.deviation < 0.7 * ModelUncertainty().link
    rest = [plan for plan in range(len(plans)) if plan not in tried]
    off_before = [abs(study.prior.seconds.means[plan] - log(truth[plans[plan]])) for plan in rest]
    off_after = [abs(learnt.posterior.seconds.means[plan] - log(truth[plans[plan]])) for plan in rest]
    assert np.mean(off_after) < np.mean(off_before) / 2
    assert (learnt.posterior.seconds.deviations[rest] < study.prior.seconds.deviations[rest]).all()


def test_factors_have_no_observations_when_there_are_no_trials(study):
    spreads = dict(zip(study.loadings.names, study.loadings.spreads, strict=True))
    assert [(factor.share, pytest.approx(factor.deviation)) for factor in study.factor_observations] == [
        (0.0, spread) for spread in spreads.values()
    ]


def test_the_true_best_is_found_with_fewer_trials_than_in_order(problem, plans, study):
    ours, in_order = [], []
    for number in range(TRUTHS):
        truth = true_seconds(plans, problem.cost_context, Error(), np.random.default_rng(number))
        ours.append(try_out(study.posterior, truth, proposed, TRIALS, (number,)).regrets)
        in_order.append(run_by_measurement(truth, study.posterior.noise, TRIALS, (number,)).regrets)
    mine, theirs = np.mean(ours, axis=0), np.mean(in_order, axis=0)
    assert mine[0] == theirs[0]  # both begin with the plan that is predicted fastest
    assert mine[1:].mean() < MARGIN * theirs[1:].mean()


def test_tried_plan_informs_when_it_is_no_candidate(problem, plans):
    few, other = plans[:3], plans[5]
    trial = Trial(other, 0.5 * seconds_of(other, problem))
    found = TrialHistory.of(few, problem.cost_context, Trials((trial,)))
    assert found.plans == (*few, other)
    assert found.posterior.best == 3
    assert (found.posterior.seconds.means[:3] < np.log([seconds_of(plan, problem) for plan in few])).all()


def test_measured_memory_corrects_the_predictions(problem, plans):
    held = estimate_with_context(plans[0], problem.cost_context)
    whole = Trial(plans[0], 1.0, peak_memory_bytes=2 * held.peak_memory_bytes)
    device, peak = max(held.memory_by_device, key=lambda pair: pair[1])
    single = Trial(plans[0], 1.0, memory_by_device=(DeviceMemory(device, 2 * peak),))
    for trial in (whole, single):
        found = TrialHistory.of(plans, problem.cost_context, Trials((trial,)))
        moved = found.posterior.memory.means - found.prior.memory.means
        assert moved[0] == pytest.approx(log(2))
        assert (moved[1:] > 0.5).all()


def test_failed_trials_form_a_document_but_cannot_be_fitted(problem, plans):
    trials = Trials((), (FailedTrial(plans[0], out_of_memory=True),))
    assert documents.loads(documents.dumps(trials), Trials) == trials
    found = TrialHistory.of(plans, problem.cost_context, trials)
    assert found.posterior.failed == {0}
    assert propose(found.posterior).trial == 1
    with pytest.raises(ValueError, match="no trial was measured"):
        fit(trials, problem.cost_context)


def test_a_plan_of_another_cluster_is_refused_by_its_place(problem, make_problem, make_cluster):
    strange = run("amp", make_problem(make_cluster(nodes=[("fast", 4)] * 3), batch=32), top=1)[0].plan
    with pytest.raises(ValueError, match="plan 1 "):
        TrialHistory.of([strange], problem.cost_context)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory, problem):
    found = tmp_path_factory.mktemp("propose")
    (found / "cluster.json").write_text(documents.dumps(problem.cluster))
    (found / "profiles.json").write_text(documents.dumps(problem.profiles))
    (found / "model.json").write_text(
        json.dumps(
            {
                "gpt": {"layers": 12, "hidden_size": 128, "heads": 4, "sequence_length": 64, "vocabulary_size": 1000},
                "global_batch_size": 32,
            }
        )
    )
    return found


def call(folder, command, *more):
    files = [f"--{name}={folder / name}.json" for name in ("cluster", "model", "profiles")]
    return CliRunner().invoke(app, [*quickly(command), *files, *more])


def answer(folder, *more):
    result = call(folder, "propose", "--output=json", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_trials(folder, trials):
    (folder / "trials.json").write_text(documents.dumps(trials))
    return f"--trials={folder / 'trials.json'}"


def test_propose_gives_the_same_answer_from_a_file_and_a_search(folder):
    listed = call(folder, "plan", "--top=8", "--output=json")
    (folder / "candidates.json").write_text(listed.stdout)
    from_file = answer(folder, f"--candidates={folder / 'candidates.json'}")
    assert from_file == answer(folder, "--top=8")
    assert from_file["verdict"] == "try"
    assert len(from_file["candidates"]) == 8
    assert documents.parse(from_file["trial"]["plan"], Plan).global_batch_size == 32
    assert from_file["trial"]["expected_seconds"] == min(one["expected_seconds"] for one in from_file["candidates"])


def test_propose_refuses_limits_with_listed_candidates(folder):
    listed = call(folder, "plan", "--top=2", "--output=json")
    (folder / "candidates.json").write_text(listed.stdout)
    refused = call(
        folder, "propose", f"--candidates={folder / 'candidates.json'}", "--use-nodes=node-1", "--max-data-degree=1"
    )
    assert refused.exit_code == 2
    assert "--use-nodes, --max-data-degree does not apply" in refused.stderr


def test_propose_ends_with_stop(folder, problem, plans):
    tried: list[Trial] = []
    for _ in range(6):
        found = answer(folder, "--top=5", *([write_trials(folder, Trials(tuple(tried)))] if tried else []))
        if found["trial"] is None:
            break
        plan = documents.parse(found["trial"]["plan"], Plan)
        assert plan not in {trial.plan for trial in tried}
        tried.append(Trial(plan, seconds_of(plan, problem, link_ratio=0.8)))
    assert found["verdict"] in {StoppingDecision.REGRET_IS_SMALL, StoppingDecision.ALL_TRIED}
    assert found["expected_regret"] < 0.01
    best = documents.parse(next(one["plan"] for one in found["candidates"] if one["rank"] == found["best"]), Plan)
    assert best == min(tried, key=lambda trial: trial.iteration_seconds).plan
    assert "Stop" in found["reason"]


def test_propose_table_shows_failures_and_corrections(folder, problem, plans, tmp_path):
    trials = Trials(
        (Trial(plans[0], 1.3 * seconds_of(plans[0], problem)),), (FailedTrial(plans[1], out_of_memory=True),)
    )
    written = tmp_path / "next.json"
    result = call(
        folder, "propose", "--top=8", "--stop-below=0", f"--write-plan={written}", write_trials(folder, trials)
    )
    assert result.exit_code == 0, result.output
    assert "device times emulated" in result.stdout
    assert "failed" in result.stdout
    assert "next: it is expected to take" in result.stdout
    assert "Corrections of the cost model" in " ".join(result.stdout.split())
    assert documents.loads(written.read_text(), Plan).in_any_format in plans[2:8]


def write_candidates(folder, *plans):
    file = folder / "listed.json"
    file.write_text(json.dumps({"candidates": [{"plan": documents.dump(plan)} for plan in plans]}))
    return f"--candidates={file}"


def test_plan_on_other_devices_of_the_same_kind_is_not_proposed_again(folder, problem, make_plan):
    layers = len(problem.model.layers)
    devices = problem.cluster.devices
    given = make_plan(problem, (layers - 4, 4), data=2, rows=2, devices=devices)
    moved = make_plan(problem, (layers - 4, 4), data=2, rows=2, devices=[*devices[2:4], *devices[:2], *devices[4:]])
    listed = write_candidates(folder, given, moved)
    assert len(answer(folder, listed)["candidates"]) == 1
    tried = answer(folder, listed, write_trials(folder, Trials((Trial(moved, 1.0),))))
    assert tried["verdict"] == StoppingDecision.ALL_TRIED
    assert documents.parse(tried["candidates"][0]["plan"], Plan).in_any_format == moved


def test_propose_table_tells_plans_apart_that_differ_in_what_they_save(folder, problem, make_plan):
    plan = make_plan(problem, (len(problem.model.layers) - 4, 4), data=2, rows=2)
    sharded = plan.map_stages(
        lambda stage: replace(stage, layers=tuple(run.with_strategy(sharding=Sharding.ZERO3) for run in stage.layers))
    )
    shown = call(folder, "propose", write_candidates(folder, plan, sharded)).stdout
    assert [line.split()[-1] for line in shown.split("layers by stage")[1].splitlines()[2:4]] == ["node-1–2", "zero3"]
    assert "dp2 tp1 mb2×8 [10 4] zero3 next" in call(folder, "propose", write_candidates(folder, sharded)).stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--candidates=nowhere.json",), "cannot be read"),
        (("--stop-below=-1",), "--stop-below must be at least 0"),
        (("--top=0",), "top must be at least 1"),
        (("--global-batch-size=search",), "cannot be `search`"),
        (("--planner=nobody",), "unknown planner"),
    ],
)
def test_propose_refuses_in_one_sentence(folder, options, words):
    result = call(folder, "propose", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize(
    "content", ['{"candidates": []}', "{}", "[]", '{"candidates": [{"plan": {}}]}', '{"candidates": [{"rank": 1}]}', ""]
)
def test_propose_refuses_invalid_candidates(folder, tmp_path, content):
    file = tmp_path / "odd.json"
    file.write_text(content)
    result = call(folder, "propose", f"--candidates={file}")
    assert result.exit_code == 2
    assert "odd.json" in result.stderr


def test_candidates_of_another_batch_are_refused(folder):
    listed = call(folder, "plan", "--top=2", "--output=json", "--global-batch-size=16")
    (folder / "smaller.json").write_text(listed.stdout)
    result = call(folder, "propose", f"--candidates={folder / 'smaller.json'}")
    assert result.exit_code == 2
    assert "got one of 16" in result.stderr
