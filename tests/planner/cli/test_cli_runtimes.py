"""Presets of runtimes on the command line."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import runtime_of
from trainwright.documents import dumps
from trainwright.exports import TARGETS, is_expressible
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.runtime import AttentionLibrary, Kernels, Runtime
from trainwright.runtime_presets import preset_file, runtime_presets

EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples" / "planner"


def test_trainwrights_own_preset_is_the_default_runtime():
    assert runtime_presets()["trainwright"].runtime == Runtime()


@pytest.mark.parametrize("name", list(runtime_presets()))
def test_every_fact_of_a_preset_has_a_source(name):
    for fact in runtime_presets()[name].facts.values():
        assert fact.source in preset_file().sources


@pytest.mark.parametrize("name", [name for name in runtime_presets() if name != "trainwright"])
def test_other_frameworks_hold_memory_before_the_first_layer(name):
    assert runtime_presets()[name].runtime.constant_bytes > 0


def test_presets_differ_in_what_decides_a_plan():
    found = {name: preset.runtime for name, preset in runtime_presets().items()}
    assert found["deepspeed"].gradient_dtype is None
    assert found["megatron"].gradient_dtype is Dtype.FLOAT32
    assert {name for name, runtime in found.items() if not runtime.reduces_every_micro_batch} == {
        "trainwright",
        "accelerate",
    }
    assert not found["megatron"].overlaps_gradients


def test_presets_of_a_year_have_what_its_trainers_had():
    found = {name: preset.runtime for name, preset in runtime_presets().items()}
    stored = {name for name, runtime in found.items() if runtime.attention_library is AttentionLibrary.STORED}
    assert stored == {"megatron-2021", "deepspeed-2021", "pytorch-2021", "transformers-2021", "tensorflow"}
    assert not any(found[name].sequence_parallel for name in stored)
    assert found["megatron-2021"].gradient_dtype is None
    assert found["tensorflow"].kernels is Kernels.EAGER
    overlapped = found["megatron-overlapped"]
    hidden = ("overlaps_gradients", "overlaps_weight_gathers", "overlaps_tensor_sync", "hides_transfers")
    assert all(getattr(overlapped, name) for name in hidden)


def test_a_name_means_its_preset_and_a_file_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runtime_of(None) == Runtime()
    assert runtime_of(Path("megatron")) == runtime_presets()["megatron"].runtime
    Path("megatron").write_text(dumps(Runtime(constant_seconds=3.0)))
    assert runtime_of(Path("megatron")).constant_seconds == 3.0


def test_runtime_is_read_from_standard_input(monkeypatch):
    given = Runtime(constant_bytes=5)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(dumps(given).encode())))
    assert runtime_of(Path("-")) == given


def test_runtimes_lists_presets_and_shows_one_with_its_sources():
    listed = CliRunner().invoke(app, ["runtimes"])
    shown = CliRunner().invoke(app, ["runtimes", "deepspeed"])
    assert all(name in listed.stdout for name in runtime_presets())
    assert "gradient_dtype: as the weights" in shown.stdout
    assert "https://www.deepspeed.ai/docs/config-json/" in shown.stdout
    facts = json.loads(CliRunner().invoke(app, ["runtimes", "--output", "json"]).stdout)["megatron"]["facts"]
    assert facts["kernels"]["value"] == "fused"


@pytest.mark.parametrize("arguments", [["runtimes", "nemo"], ["profiles", "estimate", "--runtime", "nemo"]])
def test_an_unknown_preset_is_refused_with_the_known_ones(arguments, tmp_path):
    if arguments[0] == "profiles":
        model = tmp_path / "model.yaml"
        model.write_text("vit: {layers: 2, hidden_size: 192, heads: 3}\nglobal_batch_size: 8\n")
        arguments = [*arguments, "--model", str(model), "--accelerator", "T4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "'nemo'" in result.stderr
    assert "trainwright, megatron, deepspeed, torchtitan" in result.stderr


@pytest.mark.parametrize(("options", "is_limited"), [((), True), (("--expressible-by", "any"), False)])
def test_runtime_of_a_trainer_limits_a_search_to_its_plans(options, is_limited, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    asked = [
        "plan",
        "--cluster",
        "mixed-cluster.yaml",
        "--model",
        "gpt2-medium.yaml",
        "--planner",
        "amp",
        "--runtime",
        "megatron",
    ]
    answer = CliRunner().invoke(app, [*asked, *options, "--output", "json"])
    assert answer.exit_code == 0, answer.stderr
    found = json.loads(answer.stdout)
    best = documents.parse(found["candidates"][0]["plan"], Plan)
    assert is_expressible(best, TARGETS["megatron"].capabilities) or not is_limited
    assert ("unlimited_seconds" in found) == is_limited
    assert ("only plans that megatron can run" in answer.stderr) == is_limited


@pytest.mark.parametrize(
    ("runtime", "trainer", "is_noted"),
    [
        ("torchtitan", "megatron", True),
        ("megatron", "megatron", False),
        ("accelerate", "fsdp2", False),
        ("torchtitan", "torchrun", False),
        ("trainwright", "megatron", False),
    ],
)
def test_plans_of_a_trainer_that_another_one_prices_are_noted(runtime, trainer, is_noted, capsys, make_problem):
    LimitOptions(expressible_by=trainer).limits(runtime_presets()[runtime].runtime, make_problem().cluster)
    said = " ".join(capsys.readouterr().err.split())
    expected = f"only plans that {trainer} can run, but priced as {runtime} runs them"
    assert (expected in said) == is_noted
    assert bool(said) == is_noted
