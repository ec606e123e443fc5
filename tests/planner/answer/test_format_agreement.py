"""Plan and estimate agree on one plan to the last digit, and a format that is not the fastest one is priced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.accelerators.machines import cluster_of
from trainwright.cli import app

MODEL = "gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 50304}\n"


def answered(folder: Path, *words: str, dtype: str, machines: dict[str, int]) -> Any:
    (folder / "model.yaml").write_text(f"{MODEL}global_batch_size: 32\ndtype: {dtype}\n")
    (folder / "cluster.json").write_text(documents.dumps(cluster_of(machines)))
    inputs = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}", "--output=json"]
    result = CliRunner().invoke(app, [*words, *inputs])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("machines", [{"p4d.24xlarge": 1, "p3.8xlarge": 1}, {"p3.8xlarge": 1, "g4dn.12xlarge": 1}])
@pytest.mark.parametrize("runtime", ["trainwright", "megatron"])
def test_plan_and_estimate_agree_to_the_last_digit(tmp_path: Path, machines: dict[str, int], runtime: str) -> None:
    given = {"dtype": "auto", "machines": machines}
    options = ("--planner=amp", "--top=8", f"--runtime={runtime}")
    listed = answered(tmp_path, "plan", *options, **given)["candidates"]
    assert len(listed) > 2
    for candidate in listed:
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(candidate["plan"]))
        found = answered(tmp_path, "estimate", f"--plan={plan}", f"--runtime={runtime}", **given)
        if found["dtype"] == candidate["dtype"]:  # a plan may also be listed in another format than its own best one
            assert found["predicted_seconds"] == candidate["predicted_seconds"]
            assert found["peak_memory_bytes"] == candidate["peak_memory_bytes"]
    assert found["dtype"] in {"bfloat16", "float16"}


def test_a_native_format_that_is_not_the_fastest_is_priced(tmp_path: Path) -> None:
    on_a100 = {"machines": {"p4d.24xlarge": 1}}
    slow = answered(tmp_path, "estimate", "--plan=dp8 mb1", dtype="float32", **on_a100)
    fast = answered(tmp_path, "estimate", "--plan=dp8 mb1", dtype="bfloat16", **on_a100)
    assert slow["slow_format"] == {
        "dtype": "float32",
        "emulated_on": [],
        "native": "bfloat16",
        "native_seconds": fast["predicted_seconds"],
    }
    assert fast["predicted_seconds"] < 0.5 * slow["predicted_seconds"]
    for dtype in ("bfloat16", "float16"):  # equally fast
        assert "slow_format" not in answered(tmp_path, "estimate", "--plan=dp8 mb1", dtype=dtype, **on_a100)
    found = answered(tmp_path, "plan", "--planner=megatron", dtype="float32", **on_a100)["slow_format"]
    assert found["native"] == "bfloat16"


def test_the_sentence_says_what_the_faster_format_would_take(tmp_path: Path) -> None:
    answered(tmp_path, "estimate", "--plan=dp8 mb1", dtype="float32", machines={"p4d.24xlarge": 1})
    inputs = [f"--cluster={tmp_path / 'cluster.json'}", f"--model={tmp_path / 'model.yaml'}", "--plan=dp8 mb1"]
    said = " ".join(CliRunner().invoke(app, ["estimate", *inputs]).stdout.split())
    assert "s; bfloat16 would take" in said
    assert "emulated" not in said
