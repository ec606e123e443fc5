"""Commands that read a trainer's log: `diagnose`, and `trial --log`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.calibration import Trials
from trainwright.cli import app

MODEL = """
gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 50304}
global_batch_size: 64
dtype: bfloat16
"""
PLAN = "pp1 dp16 tp1 mb4 zero1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CliRunner().invoke(app, ["cluster", "p4d.24xlarge=2"]).stdout)
    return tmp_path


def log_of(*milliseconds: float, memory: str = "") -> str:
    lines = [
        f" iteration {number}/ 100 | elapsed time per iteration (ms): {value} |"
        for number, value in enumerate(milliseconds, 1)
    ]
    return "\n".join([*lines, memory])


def call(command: str, *more: str) -> Result:
    given = ["--cluster=cluster.yaml", "--model=model.yaml", "--runtime=megatron", f"--plan={PLAN}"]
    return CliRunner().invoke(app, [command, *given, *more])


def diagnosis(*more: str) -> dict[str, object]:
    result = call("diagnose", *more, "--output=json")
    assert result.exit_code == 0, result.output
    fields: dict[str, object] = json.loads(result.stdout)
    return fields


@pytest.mark.usefixtures("folder")
def test_seconds_and_their_log_have_one_diagnosis() -> None:
    Path("run.log").write_text(log_of(5000, 900, 900, 900))
    by_seconds = diagnosis("--seconds=0.9")
    assert by_seconds == diagnosis("--log=run.log") == diagnosis("--log=run.log", "--format=megatron")
    assert by_seconds["slow"] is True
    shown = call("diagnose", "--seconds=0.9")
    assert shown.exit_code == 0, shown.output
    assert "Most likely: " in shown.stdout
    assert "as predicted" in shown.stdout


@pytest.mark.usefixtures("folder")
def test_log_in_float32_is_noted() -> None:
    Path("run.log").write_text("params_dtype ....... torch.float32\n" + log_of(5000, 300, 300))
    assert "its weights are in float32, but the prediction is of bfloat16" in call("diagnose", "--log=run.log").stderr
    causes = {}
    for dtype in ("float32", "bfloat16"):
        Path("run.log").write_text(f"params_dtype ....... torch.{dtype}\n" + log_of(5000, 1200, 1200))
        causes[dtype] = str(diagnosis("--log=run.log")["causes"])
    assert "float32 weights" in causes["float32"]
    assert "float32 weights" not in causes["bfloat16"]


@pytest.mark.usefixtures("folder")
def test_iterations_without_a_positive_time_are_named() -> None:
    Path("run.log").write_text(log_of(5000, float("nan"), 900, -3, 900))
    result = call("diagnose", "--log=run.log")
    assert result.exit_code == 0, result.output
    assert "run.log: left out iterations 2, 4 of its lines, whose time is no positive number" in result.stderr


@pytest.mark.parametrize("command", ["diagnose", "trial"])
@pytest.mark.usefixtures("folder")
def test_log_of_another_trainer_than_the_runtime_is_noted(command: str) -> None:
    Path("run.log").write_text(log_of(5000, 900, 900))
    given = ["--cluster=cluster.yaml", "--model=model.yaml", f"--plan={PLAN}", "--log=run.log"]
    own = CliRunner().invoke(app, [command, *given])
    assert "its trainer is megatron, but the prediction is of a runtime without a trainer" in own.stderr
    other = CliRunner().invoke(app, [command, *given, "--runtime=torchtitan"])
    assert "its trainer is megatron, but the prediction is of torchtitan; give --runtime megatron" in other.stderr
    assert "its trainer is" not in call(command, "--log=run.log").stderr


@pytest.mark.usefixtures("folder")
def test_plan_of_a_choice_is_a_plan_that_estimate_reads() -> None:
    result = call("diagnose", "--seconds=0.3", "--output=json", "--plan=pp2 dp1 tp8 mb8 recompute")
    first = json.loads(result.stdout)["choices"][0]
    Path("other.json").write_text(json.dumps(first["plan"]))
    estimated = call("estimate", "--plan=other.json", "--memory-headroom=0", "--output=json")
    assert json.loads(estimated.stdout)["predicted_seconds"] == pytest.approx(first["seconds"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "give --log, the log of the run, or --seconds of an iteration"),
        (("--log=run.log", "--seconds=1"), "give one of --log and --seconds, not both"),
        (("--seconds=1", "--format=megatron"), "--format needs --log"),
        (("--log=model.yaml",), "model.yaml: holds no iteration of a trainer that is known"),
        (("--log=missing.log",), "missing.log"),
        (("--log=first.log",), "first.log: holds 1 iteration of megatron"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_diagnosis_without_a_measurement_is_refused(options: tuple[str, ...], sentence: str) -> None:
    Path("first.log").write_text(log_of(2810))
    result = call("diagnose", *options)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "--report" not in result.stderr


@pytest.mark.usefixtures("folder")
def test_trial_of_a_log_is_appended_with_the_memory_of_its_ranks() -> None:
    memory = "[Rank 3] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 9000.0 | reserved: 1.0"
    Path("run.log").write_text(log_of(2000, 90, 80, 100, memory=memory))
    result = call("trial", "--log=run.log", "--append=trials.json")
    assert result.exit_code == 0, result.output
    assert "3 iteration times of megatron, after 1 of warm-up" in result.stderr
    (trial,) = documents.loads(Path("trials.json").read_text(), Trials).trials
    assert trial.iteration_seconds == 0.09
    assert trial.peak_memory_bytes == 9000 * 2**20
    again = call("trial", "--log=run.log", "--append=trials.json", "--format=megatron")
    assert "already holds this trial" in again.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "give --report, the worker's report, or --log, the log of a trainer"),
        (("--log=run.log", "--report=run.log"), "give one of --report and --log, not both"),
        (("--report=run.log", "--format=megatron"), "--format needs --log"),
        (("--report=run.log",), "give the log of another trainer by --log"),
        (("--log=run.log",), "the log is of rank 40, but the plan has 16 devices"),
        (("--log=run.log", "--format=torchtitan"), "run.log: holds no iteration of torchtitan"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_trial_without_its_log_is_refused(options: tuple[str, ...], sentence: str) -> None:
    Path("run.log").write_text(log_of(90, 80, 80, memory="[Rank 40] memory (MB) | max allocated: 9000.0"))
    result = call("trial", *options)
    assert result.exit_code == 2
    assert sentence in result.stderr
