"""Plan and estimate agree on one plan to the last digit, and a format that is not the fastest one is priced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright import documents
from trainwright.accelerators.machines import cluster_of
from trainwright.cli import app
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, Vit
from trainwright.plan import Plan
from trainwright.runtime_presets import runtime_presets
from trainwright.training import RequestedDtype, training_of

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
        for figure in ("dtype", "predicted_seconds", "peak_memory_bytes"):
            assert found[figure] == candidate[figure]
    assert found["dtype"] in {"bfloat16", "float16"}


FAMILIES: list[Family] = [
    Gpt(6, 512, 8, 256, 8192),
    Llama(6, 512, 8, 256, key_value_heads=2),
    Bert(6, 512, 8, sequence_length=256),
    Vit(6, 512, 8),
    T5(3, 512, 8, sequence_length=128),
    Moe(4, 512, 8, 256, experts=4),
    Swin((2, 2), 64, (2, 4)),
]
POOLS: list[dict[str, int]] = [
    {"p4d.24xlarge": 1, "p3.8xlarge": 1},
    {"p3.8xlarge": 1, "g4dn.12xlarge": 1},
    {"p4d.24xlarge": 1, "g4dn.12xlarge": 1},
]


PAIRS = [(family, name) for family in range(len(FAMILIES)) for name in runtime_presets()]


@pytest.mark.parametrize(
    ("family", "runtime"), PAIRS, ids=lambda part: FAMILIES[part].family if isinstance(part, int) else part
)
def test_a_listed_plan_has_the_same_estimate_when_it_is_given(family: int, runtime: str) -> None:
    """Families and runtimes meet in every pair; number formats and pools take turns."""
    turn = family + [*runtime_presets()].index(runtime)
    dtype, machines = [*RequestedDtype][turn % len(RequestedDtype)], POOLS[turn % len(POOLS)]
    training = training_of(FAMILIES[family], {"global_batch_size": 16, "dtype": dtype})
    problem = tw.problem(cluster_of(machines), training, runtime=runtime_presets()[runtime].runtime)
    listed = tw.find_plans(problem, "megatron", top=6)
    assert len(listed) > 2
    for candidate in listed:
        plan = documents.loads(documents.dumps(candidate.plan), Plan)
        assert plan.dtype is not None
        assert tw.estimate(plan, problem) == candidate.estimate


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


def test_a_plan_is_estimated_in_the_format_that_it_states(tmp_path: Path) -> None:
    """A100 alone: the search would choose bfloat16 for it."""
    on_a100 = {"machines": {"p4d.24xlarge": 1}}
    named = answered(tmp_path, "estimate", "--plan=dp8 mb1", dtype="float32", **on_a100)
    stated = answered(tmp_path, "estimate", "--plan=dp8 mb1 fp32", dtype="auto", **on_a100)
    assert stated.pop("dtype") == "float32"
    assert stated == named
    chosen = answered(tmp_path, "estimate", "--plan=dp8 mb1", dtype="auto", **on_a100)
    assert chosen["dtype"] == "bfloat16"


def test_formats_of_plan_and_model_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the plan is in float32, but the model in float16; make them equal"):
        answered(tmp_path, "estimate", "--plan=dp8 mb1 fp32", dtype="float16", machines={"p4d.24xlarge": 1})
    training = training_of(FAMILIES[0], {"global_batch_size": 16, "dtype": RequestedDtype.FLOAT16})
    problem = tw.problem(cluster_of({"p4d.24xlarge": 1}), training)
    with pytest.raises(ValueError, match="the plan is in bfloat16, but the model in float16"):
        tw.estimate(tw.plan_in_words("dp8 mb1 bf16", problem), problem)
