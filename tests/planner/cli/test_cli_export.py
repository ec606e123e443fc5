"""`trainwright export`, as a program that somebody else calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.exports import TARGETS, is_expressible
from trainwright.layer import Dtype
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime_presets import runtime_presets
from trainwright.search import Problem
from trainwright.search.candidates import candidate_of
from trainwright.strategy import Strategy

MODEL = """
gpt: {layers: 12, hidden_size: 128, heads: 4, sequence_length: 64, vocabulary_size: 1000}
global_batch_size: 16
"""
PRICED = ("--cluster", "cluster.json", "--model", "model.yaml", "--profiles", "profiles.json")


@pytest.fixture
def problem(make_problem: Callable[..., Problem]) -> Problem:
    return make_problem()


@pytest.fixture
def folder(tmp_path: Path, problem: Problem) -> Path:
    """Return a folder with cluster, model, profiles, and a plan whose stages have different degrees."""
    first, *others = problem.devices[:3]
    plan = Plan(14, 16, (Pipeline(4, 4, (stage(0, 5, first), stage(5, 9, *others))),))
    (tmp_path / "cluster.json").write_text(documents.dumps(problem.cluster))
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "profiles.json").write_text(documents.dumps(problem.profiles))
    (tmp_path / "plan.json").write_text(documents.dumps(plan))
    return tmp_path


def stage(first: int, count: int, *devices: Device) -> Stage:
    data = len(devices)
    return Stage(devices, (LayerRun(first, count, Strategy(1, data), (4 // data,) * data),))


def export(folder: Path, *options: str) -> Result:
    plan = () if options[0].startswith("pp") else ("plan.json",)
    words = [str(folder / word) if (folder / word).is_file() else word for word in (*plan, *options)]
    return CliRunner().invoke(app, ["export", *words])


@pytest.mark.parametrize("name", TARGETS)
def test_export_prices_a_plan_that_the_target_can_be_told(folder: Path, problem: Problem, name: str) -> None:
    result = export(folder, "--to", name, *PRICED, "--output", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    given = documents.loads((folder / "plan.json").read_text(), Plan)
    found = documents.parse(answer["plan"], Plan)
    assert is_expressible(found, TARGETS[name].capabilities)
    runtime = runtime_presets()[name].runtime if name in runtime_presets() else problem.runtime
    problem = replace(problem, runtime=runtime)
    assert answer["given_seconds"] == candidate_of(problem, given).estimate.iteration_seconds
    assert answer["predicted_seconds"] == candidate_of(problem, found).estimate.iteration_seconds
    assert found.dtype is problem.model.dtype
    assert (found.in_any_format == given) == (not answer["lost"])


def test_export_without_a_cluster_says_that_no_price_can_be_given(folder: Path) -> None:
    result = export(folder, "--to", "megatron")
    assert result.exit_code == 0, result.output
    assert "No price: give --cluster and --model." in result.stdout
    assert "--num-layers" not in result.stdout


def test_export_with_the_model_alone_writes_its_sizes(folder: Path) -> None:
    assert "--num-layers 12 " in export(folder, "--to", "megatron", "--model", "model.yaml").stdout


def test_export_says_of_its_arguments_only_what_is_predicted(folder: Path, problem: Problem) -> None:
    two = problem.devices[:2]
    replicas = Plan(14, 16, (Pipeline(4, 4, (Stage(two, (LayerRun(0, 14, Strategy(1, 2), (2, 2)),)),)),))
    (folder / "plan.json").write_text(documents.dumps(replicas))
    reasons = {
        ("--model", "model.yaml"): "the last backward\n",
        PRICED: "the last backward; predicted without, so it may be faster",
        (*PRICED, "--runtime", "trainwright"): "the last backward, as predicted",
    }
    for options, reason in reasons.items():
        assert reason in export(folder, "--to", "megatron", *options).stdout
    unpriced, priced = (
        export(folder, "--to", "megatron", *options).stdout for options in (("--model", "model.yaml"), PRICED)
    )
    assert "assumed: the model file says auto" in unpriced
    assert "--bf16" in unpriced
    assert "assumed" not in priced


def test_torchtitan_recomputes_and_compiles_as_predicted(folder: Path) -> None:
    (folder / "plan.json").write_text(
        documents.dumps(Plan(14, 16, (Pipeline(4, 4, (stage(0, 14, Device("node-1", 0)),)),)))
    )
    recipes = {
        ("--model", "model.yaml"): ("activation_checkpoint=None,", "compile=CompileConfig(enable=False),"),
        PRICED: ("activation_checkpoint=SelectiveAC.Config(),", "compile=CompileConfig(enable=True),"),
        (*PRICED, "--runtime", "trainwright"): ("activation_checkpoint=None,", "compile=CompileConfig(enable=False),"),
    }
    for options, words in recipes.items():
        recipe = export(folder, "--to", "torchtitan", *options).stdout
        assert all(word in recipe for word in words), recipe


def test_profiles_that_cannot_be_converted_are_to_be_measured_in_a_native_format(folder: Path) -> None:
    (folder / "model.yaml").write_text(MODEL + "dtype: float16\n")
    result = export(folder, "pp1 mb2", "--to", "torchtitan", *PRICED)
    assert result.exit_code == 2, result.output
    assert "measure them in float32" in words(result.stderr)


def test_search_for_a_tied_model_on_torchtitan_has_no_stages(folder: Path) -> None:
    files = [str(folder / word) if (folder / word).is_file() else word for word in PRICED]
    asked = ["plan", *files, "--planner=amp", "--expressible-by=torchtitan", "--top=1", "--output=json"]
    answer = json.loads(CliRunner().invoke(app, asked).stdout)
    assert len(answer["candidates"][0]["plan"]["pipelines"][0]["stages"]) == 1


def test_price_says_which_plan_takes_longer(folder: Path) -> None:
    answer = export(folder, "--to", "megatron", *PRICED)
    told = " ".join(answer.stderr.split())
    assert re.search(r"Predicted: \S+ m?s an iteration, \S+% (longer|shorter) than the given plan's \S+ m?s\.", told)
    assert "`trainwright plan --expressible-by megatron` searches among all plans that it can run" in told


def test_export_writes_its_files_into_a_folder(folder: Path) -> None:
    result = export(folder, "--to", "deepspeed", *PRICED, "--into", str(folder / "new" / "ds"))
    assert result.exit_code == 0, result.output
    assert "Predicted: " in (folder / "new" / "ds" / "launch.sh").read_text()
    assert json.loads((folder / "new" / "ds" / "ds_config.json").read_text())["train_batch_size"] == 16


@pytest.fixture
def estimated(tmp_path: Path) -> Path:
    """Return a folder with a cluster of data sheets, and a model in a format that torchtitan lacks."""
    (tmp_path / "cluster.json").write_text(documents.dumps(cluster_of({"p3.8xlarge": 1})))
    (tmp_path / "model.yaml").write_text(MODEL + "dtype: float16\n")
    return tmp_path


@pytest.mark.parametrize("name", TARGETS)
def test_export_of_estimated_profiles_says_so_in_its_files(estimated: Path, name: str) -> None:
    options = ("pp2 dp2 mb2", "--to", name, "--cluster", "cluster.json", "--model", "model.yaml", "--into")
    result = export(estimated, *options, str(estimated / "out"))
    assert result.exit_code == 0, result.output
    first = estimated / "out" / ("pytorchjobs.yaml" if name == "pytorchjob" else "launch.sh")
    assert "This is estimated from data sheets, not measured." in words(first.read_text())
    assert "Estimated from data sheets: " in words(result.stdout)


@pytest.mark.parametrize(
    ("name", "machine", "attention", "is_told"),
    [
        ("megatron", "p3.8xlarge", "fused", True),
        ("megatron", "p3.8xlarge", "stored", False),
        ("megatron", "p4d.24xlarge", "fused", False),
        ("deepspeed", "p3.8xlarge", "fused", False),
    ],
)
def test_price_says_where_attention_is_not_fused(
    estimated: Path, name: str, machine: str, attention: str, is_told: bool
) -> None:
    (estimated / "cluster.json").write_text(documents.dumps(cluster_of({machine: 1})))
    (estimated / "model.yaml").write_text(MODEL + f"dtype: float16\nattention: {attention}\n")
    files = ("--cluster", "cluster.json", "--model", "model.yaml")
    said = words(export(estimated, "pp1 mb2", "--to", name, *files).stdout)
    assert (
        "Attention stores all scores on V100: Transformer Engine has no fused kernel there for float16." in said
    ) == is_told


@pytest.mark.parametrize(
    ("name", "machine", "is_told"),
    [("torchtitan", "p3.8xlarge", True), ("torchtitan", "p4d.24xlarge", False), ("deepspeed", "p3.8xlarge", False)],
)
def test_export_says_which_gpus_the_trainers_pytorch_lacks(
    estimated: Path, name: str, machine: str, is_told: bool
) -> None:
    (estimated / "cluster.json").write_text(documents.dumps(cluster_of({machine: 1})))
    files = ("--cluster", "cluster.json", "--model", "model.yaml", "--into", str(estimated / "out"))
    said = words(export(estimated, "pp1 mb2", "--to", name, *files).stdout)
    for text in (said, words((estimated / "out" / "launch.sh").read_text())):
        assert ("is tested with has no kernels for V100: build it against PyTorch 2.10" in text) == is_told


def test_export_of_emulated_times_says_so(folder: Path) -> None:
    result = export(folder, "--to", "torchrun", *PRICED)
    assert "Device times are emulated." in words(result.stdout)
    assert "not measured" not in result.stdout


def test_export_in_an_emulated_format_says_so_with_the_price_of_it(estimated: Path) -> None:
    (estimated / "model.yaml").write_text(MODEL + "dtype: bfloat16\n")
    options = ("pp2 dp2 mb2", "--to", "deepspeed", "--cluster", "cluster.json", "--model", "model.yaml")
    said = words(export(estimated, *options, "--into", str(estimated / "out")).stdout)
    assert re.search(r"bfloat16 is emulated on V100: .*s; float16 would take", said)
    told = json.loads(export(estimated, *options, "--output", "json").stdout)["slow_format"]
    assert (told["dtype"], told["native"]) == ("bfloat16", "float16")


def test_json_of_an_export_says_what_the_price_rests_on(estimated: Path) -> None:
    files = ("--cluster", "cluster.json", "--model", "model.yaml")
    answer = json.loads(export(estimated, "pp1 mb2", "--to", "torchtitan", *files, "--output", "json").stdout)
    assert (answer["profiles"], answer["dtype"]) == ("estimated", "float32")
    (estimated / "plan.json").write_text(json.dumps(answer["plan"]))
    (estimated / "model.yaml").write_text(MODEL + f"dtype: {answer['dtype']}\n")
    named = [str(estimated / word) if "." in word else word for word in (*files, "--plan", "plan.json")]
    result = CliRunner().invoke(app, ["estimate", *named, "--runtime", "torchtitan", "--output", "json"])
    again = json.loads(result.stdout)
    assert again["predicted_seconds"] == pytest.approx(answer["predicted_seconds"], rel=0.01)  # scaled from float16
    assert again["estimated_range"]["published_runs"] == answer["estimated_range"]["published_runs"]


def words(text: str) -> str:
    return " ".join(text.replace("\n#", "\n").split())


@pytest.mark.parametrize("options", [PRICED, ("--model", "model.yaml")])
def test_export_refuses_an_optimizer_that_the_trainer_lacks(folder: Path, options: tuple[str, ...]) -> None:
    (folder / "model.yaml").write_text(MODEL + "optimizer: sgd\n")
    result = export(folder, "--to", "torchtitan", *options)
    assert result.exit_code == 2, result.output
    assert "optimizer: the trainer has adam alone, got sgd" in words(result.stderr)


CUSTOM = """
custom:
  entrypoint: mine:model
  kinds: [{name: Block, parameters: 100000, output_elements_per_row: 64, forward_flops_per_row: 2000000, saved_elements_per_row: 100}]
  layers: [Block, Block, Block, Block, Block, Block, Block, Block, Block, Block, Block, Block, Block, Block]
global_batch_size: 16
dtype: bfloat16
"""
"""Model of 14 layers, as MODEL has with its embedding and its head."""


def test_export_says_for_which_sequence_length_it_is(folder: Path) -> None:
    result = export(folder, "--to", "megatron", "--model", "model.yaml")
    assert "It is for rows of 64 tokens, by --sequence-length or the model file; the plan states none." in words(
        result.stderr
    )
    assert "--seq-length 64" in result.stdout


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_export_refuses_a_model_that_the_trainer_lacks(folder: Path, target: str) -> None:
    (folder / "model.yaml").write_text(CUSTOM)
    result = export(folder, "--to", target, "--model", "model.yaml")
    assert result.exit_code == 2, result.output
    assert "model: the trainer has no custom models; take a target that has it and runs the plan as it is: " in words(
        result.stderr
    )


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "torchrun", "pytorchjob"])
def test_export_of_a_model_of_the_users_own_starts_a_script_of_theirs(folder: Path, target: str) -> None:
    (folder / "model.yaml").write_text(CUSTOM)
    result = export(folder, "--to", target, "--model", "model.yaml")
    assert result.exit_code == 0, result.output
    assert "trainwright_pipeline.py" not in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--to", "jax"), "--to must be one of megatron, "),
        (("--to", "torchrun", "--into", "."), "which is read; write into another folder"),
        (("--to", "megatron", "--cluster", "cluster.json"), "--cluster needs --model"),
        (("--to", "megatron", "--runtime", "torchtitan"), "--runtime needs --cluster and --model to price the export"),
        (("--to", "megatron", "--profiles", "profiles.json"), "--profiles needs --cluster and --model to price"),
        (
            ("pp2 dp2", "--to", "megatron", "--model", "model.yaml"),
            "words take the devices of a cluster; give --cluster",
        ),
    ],
)
def test_export_refuses_what_it_cannot_do(folder: Path, options: tuple[str, ...], words: str) -> None:
    result = export(folder, *(str(folder) if option == "." else option for option in options))
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def stated(folder: Path, dtype: Dtype | None) -> None:
    """Let the plan of the folder state a number format, or none."""
    plan: Plan = documents.loads((folder / "plan.json").read_bytes(), Plan)
    (folder / "plan.json").write_text(documents.dumps(replace(plan, dtype=dtype)))


FORMAT_FLAGS = {Dtype.BFLOAT16: "--bf16", Dtype.FLOAT16: "--fp16"}


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("options", [(), ("--model", "model.yaml")])
def test_export_writes_the_number_format_that_the_plan_states(
    folder: Path, dtype: Dtype, options: tuple[str, ...]
) -> None:
    stated(folder, dtype)
    answer = json.loads(export(folder, "--to", "megatron", *options, "--output", "json").stdout)
    lines = answer["files"]["launch.sh"].splitlines()
    assert {flag for flag in FORMAT_FLAGS.values() if any(flag in line for line in lines)} == (
        {FORMAT_FLAGS[dtype]} if dtype in FORMAT_FLAGS else set()
    )
    assert (answer["dtype"], answer["plan"]["dtype"]) == (dtype, dtype)
    assert "dtype_reason" not in answer
    assert "states no number format" not in export(folder, "--to", "megatron", *options).stdout


def test_export_says_of_a_plan_without_a_number_format_which_one_it_takes(folder: Path) -> None:
    alone = words(export(folder, "--to", "megatron").stdout)
    assert "The plan states no number format; neither does a model (--model), so it is yours." in alone
    named = folder / "named.yaml"
    named.write_text(MODEL + "dtype: float16\n")
    of_file = words(export(folder, "--to", "megatron", "--model", "named.yaml").stdout)
    assert "The plan states no number format; it is written in float16: number format of the model file." in of_file
    assumed = words(export(folder, "--to", "megatron", "--model", "model.yaml").stdout)
    assert "it is written in bfloat16: assumed: the model file says auto" in assumed
    priced = export(folder, "--to", "megatron", *PRICED, "--output=json")
    assert json.loads(priced.stdout)["dtype_reason"] == "number format of the profiles"


def test_a_number_format_that_contradicts_the_model_or_the_profiles_is_refused(folder: Path) -> None:
    stated(folder, Dtype.BFLOAT16)
    named = folder / "named.yaml"
    named.write_text(MODEL + "dtype: float16\n")
    without_price = export(folder, "--to", "megatron", "--model", "named.yaml")
    assert without_price.exit_code == 2
    assert "the plan is in bfloat16, but the model in float16; make them equal" in words(without_price.stderr)
    assert f"or leave dtype out of {named}" in words(without_price.stderr)
    priced = export(folder, "--to", "megatron", *PRICED)  # the profiles are in float32
    assert priced.exit_code == 2
    assert "the plan is in bfloat16, but the model in float32; make them equal" in words(priced.stderr)


def test_format_that_the_trainer_lacks_is_lost_also_without_a_price(folder: Path) -> None:
    stated(folder, Dtype.FLOAT16)
    answer = json.loads(export(folder, "--to", "torchtitan", "--output=json").stdout)
    assert "float16: it has bfloat16 and float32" in answer["lost"]
    assert answer["dtype"] == "bfloat16"
    assert answer["dtype_reason"] == "assumed: torchtitan 0.3.0 has no float16; give --cluster to choose it"
