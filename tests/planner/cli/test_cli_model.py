"""Command `trainwright model`: what it refuses, and its formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from trainwright.cli import app

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 1000,
}  # fmt: skip


def call(folder: Path, content: str, *options: str) -> Result:
    file = folder / "config.json"
    file.write_text(content)
    return CliRunner().invoke(app, ["model", str(file), *options], env={"COLUMNS": "400"})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "expected a mapping at the top, got nothing"),
        ("[]", "expected a mapping at the top, got a list"),
        ("{}", "give exactly one model family"),
    ],
)
def test_a_file_without_a_model_is_refused_by_what_it_is(content, sentence, tmp_path) -> None:
    done = call(tmp_path, content, "--sequence-length", "2048")
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_model_above_the_bounds_of_a_training_plan_is_refused_as_one_alone(tmp_path) -> None:
    tokens = "--sequence-length", "2000000"
    done = call(tmp_path, json.dumps(LLAMA), *tokens, "--training-plan")
    assert done.exit_code == 2
    assert "llama.sequence_length must be at most 1,048,576, got 2000000" in done.stderr
    assert call(tmp_path, json.dumps(LLAMA), *tokens).exit_code == 0


@pytest.mark.parametrize("form", ["--training-plan", "--document"])
def test_what_is_written_is_json_where_that_is_the_output(form, tmp_path) -> None:
    in_yaml = call(tmp_path, json.dumps(LLAMA), "--sequence-length", "16", form).stdout
    in_json = call(tmp_path, json.dumps(LLAMA), "--sequence-length", "16", form, "--output", "json").stdout
    assert json.loads(in_json) == yaml.safe_load(in_yaml)
