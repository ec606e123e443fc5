"""Conversion of a trial's report to the trials document that `calibrate` and `propose` read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from quick_planner import quickly
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.calibration import DeviceMemory, FailedTrial, Trial, Trials
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.cost.estimate import estimate_with_context
from trainwright.exports import TARGETS, is_expressible
from trainwright.exports.plan_shorthand import plan_of_shorthand
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.search import Problem, run
from trainwright.worker_api import RankMemory, TrialReport

MODEL = """
gpt: {layers: 6, hidden_size: 128, heads: 4, sequence_length: 64, vocabulary_size: 1000}
global_batch_size: 16
"""
runner = CliRunner()


@pytest.fixture(scope="module")
def problem(make_problem: Callable[..., Problem]) -> Problem:
    return make_problem(layers=6)


@pytest.fixture(scope="module")
def plans(problem: Problem) -> Sequence[Plan]:
    return [candidate.plan for candidate in run("amp", problem, top=4)]


@pytest.fixture
def folder(tmp_path: Path, problem: Problem) -> Path:
    (tmp_path / "cluster.json").write_text(documents.dumps(problem.cluster))
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "profiles.json").write_text(documents.dumps(problem.profiles))
    return tmp_path


def report_of(plan: Plan, seconds: float, peak_bytes: int = 10**8) -> TrialReport:
    memory = tuple(RankMemory(device.node, device.slot, peak_bytes + n) for n, device in enumerate(plan.devices))
    return TrialReport((1.1 * seconds, seconds, 0.9 * seconds), (3.0,), memory, 1000, 1)


def call(folder: Path, command: str, *more: str) -> Result:
    names = {"cluster": "cluster.json", "model": "model.yaml", "profiles": "profiles.json"}
    return runner.invoke(
        app, [*quickly(command), *(f"--{name}={folder / file}" for name, file in names.items()), *more]
    )


def append(folder: Path, plan: Plan, report: TrialReport, *more: str, name: str = "trials.json") -> Result:
    (folder / "plan.json").write_text(documents.dumps(plan))
    (folder / "report.json").write_text(documents.dumps(report))
    given = (f"--plan={folder / 'plan.json'}", f"--report={folder / 'report.json'}", f"--append={folder / name}")
    return call(folder, "trial", *given, *more)


def refused(result: Result, code: int = 2) -> str:
    assert result.exit_code == code, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def held(folder: Path) -> Trials:
    return documents.loads((folder / "trials.json").read_text(), Trials)


def test_appended_reports_are_read_by_calibrate_and_propose(
    folder: Path, problem: Problem, plans: Sequence[Plan]
) -> None:
    for number, plan in enumerate(plans, 1):
        seconds = 1.3 * estimate_with_context(plan, problem.cost_context).iteration_seconds
        result = append(folder, plan, report_of(plan, seconds))
        assert result.exit_code == 0, result.output
        assert "tokens a second" in result.stdout
        assert f"which holds {number} measured trial{'s' * (number > 1)}\n" in result.stderr
        last = held(folder).trials[-1]
        memory = tuple(DeviceMemory(device, 10**8 + n) for n, device in enumerate(plan.devices))
        stating = replace(plan, dtype=problem.model.dtype)
        assert last == Trial(stating, seconds, 10**8 + len(plan.devices) - 1, memory)
    fitted = call(folder, "calibrate", f"--trials={folder / 'trials.json'}", f"--write={folder / 'runtime.json'}")
    assert fitted.exit_code == 0, fitted.output
    assert call(folder, "propose", f"--trials={folder / 'trials.json'}").exit_code == 0


def test_trials_are_calibrated_in_the_number_format_that_their_plans_state(tmp_path: Path) -> None:
    """A100, of which `auto` alone would take bfloat16; plans that state none do not turn it into a fact."""
    cluster = cluster_of({"p4d.24xlarge": 1})
    words = f"--cluster={tmp_path / 'cluster.json'} --model={tmp_path / 'model.yaml'}".split()
    (tmp_path / "cluster.json").write_text(documents.dumps(cluster))
    (tmp_path / "model.yaml").write_text(MODEL)
    plan = plan_of_shorthand("dp8 mb2", cluster.devices, 8, 16)
    for dtype in (Dtype.FLOAT32, None):
        (tmp_path / "plan.json").write_text(documents.dumps(replace(plan, dtype=dtype)))
        priced = runner.invoke(app, ["estimate", *words, f"--plan={tmp_path / 'plan.json'}", "--output=json"])
        seconds = json.loads(priced.stdout)["predicted_seconds"]
        (tmp_path / "report.json").write_text(documents.dumps(report_of(plan, seconds)))
        more = (f"--plan={tmp_path / 'plan.json'}", f"--report={tmp_path / 'report.json'}")
        appended = runner.invoke(app, ["trial", *words, *more, f"--append={tmp_path / f'{dtype}.json'}"])
        assert appended.exit_code == 0, appended.output
        trials = f"--trials={tmp_path / f'{dtype}.json'}"
        (trial,) = documents.loads((tmp_path / f"{dtype}.json").read_text(), Trials).trials
        assert trial.plan.dtype is dtype
        fitted = runner.invoke(app, ["calibrate", *words, trials, f"--write={tmp_path / 'runtime.json'}"])
        assert fitted.exit_code == 0, fitted.output
        assert ("dtype auto: taken as bfloat16" in fitted.stderr) == (dtype is None)
    both = Trials(tuple(Trial(replace(plan, dtype=dtype), 1.0) for dtype in (Dtype.FLOAT32, Dtype.FLOAT16)))
    (tmp_path / "both.json").write_text(documents.dumps(both))
    mixed = runner.invoke(app, ["calibrate", *words, f"--trials={tmp_path / 'both.json'}"])
    assert "both.json: there are plans in float16 and in float32; give those of one number format" in mixed.stderr


def test_proposals_leave_no_trial_of_another_number_format_out_in_silence(folder: Path, plans: Sequence[Plan]) -> None:
    trials = Trials((Trial(replace(plans[0], dtype=Dtype.FLOAT16), 1.0),))
    (folder / "trials.json").write_text(documents.dumps(trials))
    said = refused(call(folder, "propose", f"--trials={folder / 'trials.json'}"))
    assert "holds a trial in float16" in said
    assert "but the candidates are in float32; leave it out" in said


def test_calibrated_runtime_keeps_its_trainer(folder: Path, problem: Problem, plans: Sequence[Plan]) -> None:
    for plan in plans:
        seconds = estimate_with_context(plan, problem.cost_context).iteration_seconds
        append(folder, plan, report_of(plan, seconds, 3_100_000_000))  # of which Megatron's processes hold most
    trials, runtime = f"--trials={folder / 'trials.json'}", folder / "runtime.json"
    fitted = call(folder, "calibrate", trials, "--runtime=megatron", f"--write={runtime}")
    assert fitted.exit_code == 0, fitted.output
    for name in ("megatron", runtime):
        planned = call(folder, "plan", f"--runtime={name}", "--output=json")
        assert "only plans that megatron can run" in planned.stderr
        best = documents.parse(json.loads(planned.stdout)["candidates"][0]["plan"], Plan)
        assert is_expressible(best, TARGETS["megatron"].capabilities)
    runtime.write_text(runtime.read_text().replace('"megatron"', '"nemo"'))
    assert "trainer of --runtime must be one of" in refused(call(folder, "plan", f"--runtime={runtime}"))


def test_report_is_appended_once_and_another_run_of_its_plan_again(folder: Path, plans: Sequence[Plan]) -> None:
    append(folder, plans[0], report_of(plans[0], 1.0))
    written = (folder / "trials.json").read_bytes()
    again = append(folder, plans[0], report_of(plans[0], 1.0))
    assert again.exit_code == 0
    assert "already holds this trial; nothing was added" in again.stderr
    assert (folder / "trials.json").read_bytes() == written
    append(folder, plans[0], report_of(plans[0], 1.01))
    append(folder, plans[1], report_of(plans[1], 1.0))
    assert len(held(folder).trials) == 3


def test_append_keeps_existing_trials(folder: Path, plans: Sequence[Plan]) -> None:
    before = Trials((Trial(plans[0], 2.0, name="by hand"),), (FailedTrial(plans[1], out_of_memory=True),))
    (folder / "trials.json").write_text(documents.dumps(before))
    (folder / "trials.json").chmod(0o640)
    (folder / "link.json").symlink_to("trials.json")
    without = replace(report_of(plans[2], 1.0), memory=())
    assert append(folder, plans[2], without, name="link.json").exit_code == 0
    added = Trial(replace(plans[2], dtype=Dtype.FLOAT32), 1.0)  # as the profiles are
    assert held(folder) == replace(before, trials=(*before.trials, added))
    assert (folder / "trials.json").stat().st_mode & 0o777 == 0o640
    assert (folder / "link.json").is_symlink()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "trials.json: expected a mapping at the top, got nothing"),
        ('{"document": "Plan"}', "trials.json: expected a document of kind Trials, got 'Plan'"),
        ('{"layers": []}', "trials.json: expected a document of kind Trials, got one of kind Profiles"),
        ("{", "trials.json: neither YAML nor JSON"),
    ],
)
def test_append_refuses_and_keeps_a_file_without_trials(
    folder: Path, plans: Sequence[Plan], content: str, told: str
) -> None:
    (folder / "trials.json").write_text(content)
    assert told in refused(append(folder, plans[0], report_of(plans[0], 1.0)))
    assert (folder / "trials.json").read_text() == content


def test_trials_of_another_model_or_cluster_are_refused(
    folder: Path, make_problem: Callable[..., Problem], plans: Sequence[Plan]
) -> None:
    deeper = run("amp", make_problem(layers=9), top=1)[0].plan
    document = documents.dump(Trials((Trial(plans[0], 1.0),), (FailedTrial(deeper),)))
    (folder / "trials.json").write_text(json.dumps(document))
    told = refused(append(folder, plans[0], report_of(plans[0], 1.0)))
    assert "for another model or cluster: the plan is for a model of 11 layers, but this one has 8" in told
    elsewhere = documents.dumps(Trials((Trial(plans[0], 1.0),))).replace("node-1", "node-one")
    (folder / "trials.json").write_text(elsewhere)
    assert "the cluster has no node node-one" in refused(append(folder, plans[0], report_of(plans[0], 1.0)))
    assert (folder / "trials.json").read_text() == elsewhere


def test_append_refuses_yaml(folder: Path, plans: Sequence[Plan]) -> None:
    text = f"# by hand\ntrials:\n- iteration_seconds: 2.0\n  plan: {documents.dumps(plans[0])}\n"
    (folder / "trials.json").write_text(text)
    assert "is YAML, which would lose its comments" in refused(append(folder, plans[0], report_of(plans[0], 1.0)))
    assert (folder / "trials.json").read_text() == text


def test_append_refuses_a_late_emulated_trial_and_a_file_named_twice(folder: Path, plans: Sequence[Plan]) -> None:
    report = report_of(plans[0], 1.0)
    told = refused(append(folder, plans[0], replace(report, late_segments=11)))
    assert "report.json: 11 of 1000 computations took longer than the emulated devices would" in told
    more = f"--trace={folder / 'trials.json'}"
    assert "give each a file of its own" in refused(append(folder, plans[0], report, more))
    assert not (folder / "trials.json").exists()


def test_file_stays_intact_when_writing_fails(
    folder: Path, plans: Sequence[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(folder, plans[0], report_of(plans[0], 1.0))
    written, files = (folder / "trials.json").read_bytes(), {*folder.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    told = refused(append(folder, plans[1], report_of(plans[1], 1.0)), 1)
    assert "trials.json: No space left on device" in told
    assert (folder / "trials.json").read_bytes() == written
    assert {*folder.iterdir()} == files


def test_append_refuses_a_path_that_is_not_a_file(folder: Path, plans: Sequence[Plan]) -> None:
    report = report_of(plans[0], 1.0)
    os.mkfifo(folder / "pipe")
    assert "not a regular file" in refused(append(folder, plans[0], report, name="pipe"))
    assert "Is a directory" in refused(append(folder, plans[0], report, name="."), 1)
    assert "No such file" in refused(append(folder, plans[0], report, name="nowhere/trials.json"), 1)


def test_memory_of_devices_that_the_plan_lacks_is_refused(folder: Path, plans: Sequence[Plan]) -> None:
    report = report_of(plans[0], 1.0)
    assert Device("far", 0) not in plans[0].devices
    odd = replace(report, memory=(*report.memory, RankMemory("far", 0, 1)))
    assert "give the plan that was tried" in refused(append(folder, plans[0], odd))
    of_a_job = replace(report, losses=(), memory=(RankMemory("far", 0, 1),))
    assert "far:0 is in only one of them" in refused(append(folder, plans[0], of_a_job))


def test_calibrate_takes_plans_in_words_and_names_the_wrong_one(folder: Path) -> None:
    text = "trials:\n- {plan: pp2 dp2 tp2 mb1, iteration_seconds: 0.2}\n- {plan: pp1 dp8 mb1, iteration_seconds: 0.3}\n"
    (folder / "trials.yaml").write_text(text)
    given = f"--trials={folder / 'trials.yaml'}"
    fitted = call(folder, "calibrate", given, f"--write={folder / 'runtime.json'}")
    assert fitted.exit_code == 0, fitted.output
    assert "pp2 dp2 tp2" in fitted.output
    (folder / "trials.yaml").write_text(text.replace("dp8", "dp16"))
    assert "trials.yaml: trials.1: plan 'pp1 dp16 mb1': needs 16 devices" in refused(call(folder, "calibrate", given))


def test_plans_in_words_are_taken_by_propose_and_kept_by_append(
    folder: Path, problem: Problem, plans: Sequence[Plan]
) -> None:
    entries = [{"plan": "pp2 dp2 tp2 mb1", "iteration_seconds": 0.2}]
    (folder / "trials.json").write_text(json.dumps({"trials": entries, "failed": [{"plan": "pp1 dp8 mb1"}]}))
    given = f"--trials={folder / 'trials.json'}"
    proposed = call(folder, "propose", given)
    assert proposed.exit_code == 0, proposed.output
    assert append(folder, plans[0], report_of(plans[0], 0.2)).exit_code == 0
    assert held(folder).trials[0].plan.summary().startswith("pp2 dp2 tp2 ")
    assert len(held(folder).failed) == 1
    (folder / "trials.json").write_text(json.dumps({"trials": [{**entries[0], "plan": "best"}]}))
    for result in (call(folder, "propose", given), append(folder, plans[0], report_of(plans[0], 0.2))):
        assert "trials.json: trials.0.plan: expected a mapping, or the words of a plan (" in refused(result)


def test_measurements_that_calibrate_refuses_are_refused_by_propose_and_append(
    folder: Path, problem: Problem, plans: Sequence[Plan]
) -> None:
    found = estimate_with_context(plans[1], problem.cost_context)
    good, slow = (report_of(plans[1], factor * found.iteration_seconds) for factor in (1.2, 1000))
    mebibytes = replace(good, memory=tuple(replace(rank, peak_bytes=4) for rank in good.memory))
    assert append(folder, plans[1], good).exit_code == 0
    written = (folder / "trials.json").read_bytes()
    for report, words in ((slow, "iteration_seconds is"), (mebibytes, "peak_bytes of node-1:0 is 4,")):
        told = refused(append(folder, plans[1], report))
        assert f"report.json: {words}" in told
        assert "; nothing was added; check the unit" in told
        assert (folder / "trials.json").read_bytes() == written
        refused_too = replace(held(folder), trials=(*held(folder).trials, Trial.of(plans[1], report)))
        (folder / "odd.json").write_text(documents.dumps(refused_too))
        for command in ("propose", "calibrate"):
            assert f"{words}" in refused(call(folder, command, f"--trials={folder / 'odd.json'}"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"planner": "auto", "candidates": []}', "expected trials, got the candidates of `trainwright plan`"),
        ("iteration 1 elapsed time per iteration (ms): 2300.1\niteration 2: 5\n", "holds no trials; give a document"),
        ("[rank0]: loss: 1\n\tstep", "; give a document with plans and their iteration_seconds under `trials`"),
        (
            '{"iteration_seconds": [2.5]}',
            "trainwright trial --append` writes one from the plan and the worker's report",
        ),
    ],
)
@pytest.mark.parametrize("command", ["calibrate", "propose"])
def test_other_files_than_trials_are_refused_with_what_is_expected(
    folder: Path, content: str, told: str, command: str
) -> None:
    (folder / "other.json").write_text(content)
    assert told in refused(call(folder, command, f"--trials={folder / 'other.json'}"))


def test_calibrate_refuses_milliseconds_and_tells_of_an_outlier(
    folder: Path, problem: Problem, plans: Sequence[Plan]
) -> None:
    def calibrated(factor: float) -> Result:
        seconds = [estimate_with_context(plan, problem.cost_context).iteration_seconds for plan in plans]
        seconds[2] *= factor
        trials = (
            Trial(plan, taken, name=f"run {n}") for n, (plan, taken) in enumerate(zip(plans, seconds, strict=True))
        )
        (folder / "trials.json").write_text(documents.dumps(Trials(tuple(trials))))
        return call(folder, "calibrate", f"--trials={folder / 'trials.json'}", f"--write={folder / 'runtime.json'}")

    told = refused(calibrated(1000.0))
    assert "trials.json: trials.2 (run 2): iteration_seconds is" in told
    assert "1,000 times the prediction" in told
    assert "milliseconds" in told
    assert not (folder / "runtime.json").exists()
    assert " ".join(calibrated(4.0).stdout.split()).count("run 2 took 4 times what the other trials let expect") == 1
    assert "let expect" not in calibrated(1.02).stdout


def test_calibrate_tells_of_several_outliers_in_one_sentence_and_of_memory_apart(
    folder: Path, problem: Problem, plans: Sequence[Plan]
) -> None:
    found = [estimate_with_context(plan, problem.cost_context) for plan in (*plans, *plans)]

    def told(slow: int, large: int) -> str:
        trials = [
            Trial(
                plan,
                one.iteration_seconds * (15 if number < slow else 1),
                one.peak_memory_bytes * (4 if 1 <= number <= large else 1),
                name=f"run {number}",
            )
            for number, (plan, one) in enumerate(zip((*plans, *plans), found, strict=True))
        ]
        (folder / "trials.json").write_text(documents.dumps(Trials(tuple(trials))))
        result = call(folder, "calibrate", f"--trials={folder / 'trials.json'}", f"--write={folder / 'runtime.json'}")
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split())

    two = told(2, 1)
    assert (
        "run 0 and run 1 took 15 times what the other trials let expect, so they hardly count; check how they were"
        in two
    )
    assert (
        "run 1 held 4 times the memory that the other trials let expect, so it hardly counts; check how it was" in two
    )
    assert two.count("let expect") == 2
    assert "outlier, memory outlier" in two
    every = told(8, 0)
    assert every.count("expect, so") == 1
    assert "All 8 trials took" in every
    assert "so no factors explain them; check the unit" in every
