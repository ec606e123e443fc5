"""`trainwright size`, and the number of machines with which a refusal of `plan` for memory ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.accelerators import machine
from trainwright.cli import app
from trainwright.plan import Plan

runner = CliRunner()
MODEL = """\
gpt: {layers: 12, hidden_size: 768, heads: 12, sequence_length: 1024, vocabulary_size: 50304}
global_batch_size: 32
dtype: float16
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return str(path)


def test_size_answers_for_each_accelerator_in_a_table_and_in_json(model: str) -> None:
    asked = ["size", "--model", model, "--accelerators", "T4,A100-80,A100-80GB", "--budget-seconds", "2"]
    shown = runner.invoke(app, [*asked, "--tokens", "1e9"])
    assert shown.exit_code == 0, shown.output
    assert "The model: " in shown.stdout
    assert "one holds the model." in shown.stdout
    assert "The run of " in shown.stdout
    assert shown.stdout.count("Estimated from data sheets: ") == 2
    assert shown.stdout.count("Trainwright's own worker is assumed") == 1
    answer = json.loads(runner.invoke(app, [*asked, "--output", "json"]).stdout)
    assert [size["accelerator"] for size in answer["sizes"]] == ["Tesla-T4", "NVIDIA-A100-SXM4-80GB"]
    assert [size["machine"] for size in answer["sizes"]] == ["g4dn.xlarge", "p4de.24xlarge"]
    for size in answer["sizes"]:
        plan = documents.parse(size["plan"], Plan, source="plan")
        assert len(plan.devices) <= size["devices"]
        assert size["predicted_seconds"] > 0
        # A machine is rented whole, however few of its devices the model needs.
        price = machine(size["machine"]).price_per_hour
        assert price is not None
        assert size["price_per_hour"] == price.value
        assert size["estimated_range"]["least_seconds"] < size["predicted_seconds"]


def test_a_run_without_a_price_says_so(model: str) -> None:
    asked = ["size", "--model", model, "--accelerators", "RTX 4090", "--tokens", "1e9", "--budget-seconds", "1"]
    shown = runner.invoke(app, asked).stdout
    assert "NVIDIA-GeForce-RTX-4090 has no price, so what the run costs is not known." in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "refusal", "code"),
    [
        (["--accelerators", "A100-60"], "--accelerators: no data sheet for accelerator 'A100-60'", 2),
        (["--accelerators", ","], "--accelerators needs at least one name", 2),
        (["--accelerators", "T4", "--within", "3"], "--within needs --tokens", 2),
        (["--accelerators", "T4", "--tokens", "-1"], "--tokens must be finite and above 0", 2),
        (
            ["--accelerators", "T4", "--tokens", "1e15", "--within", "1"],
            "no number of Tesla-T4 up to 4,096 ends the run within 1 day",
            3,
        ),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(model: str, options: list[str], refusal: str, code: int) -> None:
    result = runner.invoke(app, ["size", "--model", model, *options, "--budget-seconds", "2"])
    assert result.exit_code == code
    assert refusal in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_refusal_of_plan_for_memory_ends_with_the_machines_that_would_do(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(
        "llama: {layers: 32, hidden_size: 4096, heads: 32, sequence_length: 1024}\nglobal_batch_size: 32\ndtype: float16\n"
    )
    cluster = tmp_path / "cluster.yaml"
    for words, end in (
        (["g4dn.12xlarge=2"], " of these machines would do, "),
        (["a=4xT4", "b=2xV100-16", "--network", "10Gbit"], " of each of these machines would do, "),
    ):
        cluster.write_text(runner.invoke(app, ["cluster", *words]).stdout)
        result = runner.invoke(app, ["plan", "--cluster", str(cluster), "--model", str(model)])
        assert result.exit_code == 3, result.output
        assert "no plan fits into memory" in result.stderr
        assert end in result.stderr
