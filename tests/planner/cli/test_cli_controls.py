"""Names in documents steer no terminal: control characters are refused with their place, other letters are printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright
from trainwright import documents
from trainwright.cli import app
from trainwright.cluster import Cluster
from trainwright.search import Problem

runner = CliRunner()
CONTROLS = ("\x1b[31m", "\x1b]0;x\x07", "\x9b2J", "\x00", "\u202e", "\u200b", "\u2028", "\ufeff")


@pytest.fixture(scope="module")
def given(make_problem: Callable[..., Problem]) -> dict[str, Any]:
    problem = make_problem(layers=2, heads=2, batch=4, hidden=16)
    model = {
        "gpt": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 4, "vocabulary_size": 10},
        "global_batch_size": 4,
    }
    return {"cluster": documents.dump(problem.cluster), "model": model, "profiles": documents.dump(problem.profiles)}


def answer(folder: Path, given: dict[str, Any], *, is_ascii: bool = True) -> tuple[int, str]:
    options = []
    for name, document in given.items():
        (folder / f"{name}.json").write_text(json.dumps(document, ensure_ascii=is_ascii), encoding="utf-8")
        options += [f"--{name}", str(folder / f"{name}.json")]
    result = runner.invoke(app, ["plan", *options, "--planner", "megatron"])
    return result.exit_code, result.output


def renamed(document: Any, old: str, new: str) -> Any:
    return json.loads(json.dumps(document).replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1]))


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
@pytest.mark.parametrize("name", ["cluster", "profiles"])
def test_control_character_in_a_name_is_refused_with_its_place(
    name: str, control: str, given: dict[str, Any], tmp_path: Path
) -> None:
    accelerator = given["cluster"]["accelerators"][0]["name"]
    changed = given | {name: renamed(given[name], accelerator, f"{accelerator}{control}x")}
    for is_ascii in (True, control < "\x20"):
        status, told = answer(tmp_path, changed, is_ascii=is_ascii)
        assert status == 2
        assert f"holds the control or invisible character U+{ord(control[0]):04X}; remove it" in " ".join(told.split())
        assert "accelerator" in told
        assert all(one == "\n" or one.isprintable() for one in told)
    with pytest.raises(documents.DocumentError, match="holds the control or invisible character"):
        trainwright.read(tmp_path / "cluster.json", Cluster) if name == "cluster" else documents.loads_given(
            (tmp_path / "profiles.json").read_bytes(), Cluster
        )


def test_letters_of_every_script_are_printed(given: dict[str, Any], tmp_path: Path) -> None:
    accelerator = given["cluster"]["accelerators"][0]["name"]
    status, told = answer(
        tmp_path, {name: renamed(one, accelerator, "emulated-Gerät-日本-🚀") for name, one in given.items()}
    )
    assert status == 0, told


def test_table_of_another_tool_with_a_control_character_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    (tmp_path / "table.json").write_text(json.dumps({"a\x1b[8m": {"1": {"0": [1.0, 1.0, 1.0]}}}))
    (tmp_path / "model.json").write_text(json.dumps(given["model"]))
    words = [
        "profiles",
        "import",
        str(tmp_path / "table.json"),
        "--format",
        "sailor",
        "--model",
        str(tmp_path / "model.json"),
    ]
    result = runner.invoke(app, words)
    assert result.exit_code == 2
    assert "\x1b" not in result.output
