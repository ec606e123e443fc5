"""`dtype` of model files on the command line: chosen where it is `auto`, with its price where it is slow."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.answer import SlowFormat
from trainwright.cli import app
from trainwright.documents import dumps
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import LayerProfile, Profiles
from trainwright.report.format_sentences import slow_format
from trainwright.worker_api import TrialReport

MODEL = """
gpt: {layers: 4, hidden_size: 1024, heads: 8, sequence_length: 512, vocabulary_size: 8192}
global_batch_size: 32
"""
SHORT_MODEL = MODEL.replace("sequence_length: 512", "sequence_length: 16").replace("size: 32", "size: 4")
"""Model whose state takes most of its memory, so that float32 fits where a half format does not."""
A100 = "NVIDIA-A100-SXM4-40GB"
NAMED = "bfloat16 is emulated on V100 and T4: "


MACHINES = {
    "mixed": {"p3.8xlarge": 1, "g4dn.12xlarge": 1},
    "ampere": {"a2-highgpu-4g": 1},
    "three types": {"p4d.24xlarge": 1, "p3.8xlarge": 1, "g4dn.12xlarge": 1},
}


def call(folder: Path, command: str, *options: str, dtype: str = "auto", machines: str = "mixed") -> Result:
    (folder / "model.yaml").write_text(MODEL + f"dtype: {dtype}\n" if dtype != "auto" else MODEL)
    (folder / "cluster.json").write_text(dumps(cluster_of(MACHINES[machines])))
    given = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]
    result = CliRunner().invoke(app, [command, *given, *options])
    assert result.exit_code == 0, result.output
    return result


def answer(*arguments: Any, **changes: str) -> Any:
    return json.loads(call(*arguments, "--output=json", **changes).stdout)


def words(result: Result) -> str:
    return words_of(result.stdout)


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("kernel", "says"), [("math", True), ("memory_efficient", False)])
def test_plan_names_layers_whose_measured_attention_stores_all_scores(tmp_path: Path, kernel: str, says: bool) -> None:
    model = Model.of(Gpt(4, 1024, 8, 512, 8192), Dtype.BFLOAT16)
    estimated = estimate_profiles(model, [A100], tensor_degrees=(1, 2, 4), rows=(1, 2, 4))
    layers = tuple(replace(one, attention=(kernel,) if one.kind == "block" else ()) for one in estimated.layers)
    (tmp_path / "profiles.json").write_text(dumps(Profiles(layers)))
    given = ("--planner=megatron", f"--profiles={tmp_path / 'profiles.json'}")
    shown = words(call(tmp_path, "plan", *given, machines="ampere", dtype="bfloat16"))
    assert ("Attention of block stores all scores on A100" in shown) == says


@pytest.mark.parametrize(("share", "says"), [(0.95, True), (0.8, False)])
def test_plan_names_layers_that_the_host_bounds_at_all_rows_and_degrees(
    tmp_path: Path, share: float, says: bool
) -> None:
    model = Model.of(Gpt(4, 1024, 8, 512, 8192), Dtype.BFLOAT16)

    def submitted(one: LayerProfile) -> LayerProfile:
        least = share if (one.rows, one.tensor_degree) == (4, 2) else 1.0
        seconds = least * (one.forward_seconds + one.backward_seconds) if one.kind == "block" else 0.0
        return replace(one, submission_seconds=seconds)

    estimated = estimate_profiles(model, [A100], tensor_degrees=(1, 2, 4), rows=(1, 2, 4))
    (tmp_path / "profiles.json").write_text(dumps(Profiles(tuple(map(submitted, estimated.layers)))))
    given = ("--planner=megatron", f"--profiles={tmp_path / 'profiles.json'}")
    shown = words(call(tmp_path, "plan", *given, machines="ampere", dtype="bfloat16"))
    assert ("The host bounds block on A100" in shown) == says


@pytest.mark.parametrize(("machines", "dtype"), [("mixed", "float16"), ("ampere", "bfloat16")])
def test_auto_gives_the_candidates_of_the_best_native_format(tmp_path: Path, machines: str, dtype: str) -> None:
    chosen = answer(tmp_path, "plan", "--planner=megatron", machines=machines)
    named = answer(tmp_path, "plan", "--planner=megatron", machines=machines, dtype=dtype)
    assert chosen["dtype"] == dtype
    assert {one.pop("dtype") for one in chosen["candidates"]} == {dtype}
    assert chosen["candidates"] == named["candidates"]
    assert "dtype" not in named
    assert "slow_format" not in named
    shown = words(call(tmp_path, "plan", "--planner=megatron", machines=machines))
    assert f"Number format: {dtype}, the fastest that " in shown


def test_every_command_states_the_price_of_a_slow_format(tmp_path: Path) -> None:
    fast = answer(tmp_path, "plan", "--planner=megatron")["candidates"][0]["predicted_seconds"]
    plan = f"--plan={tmp_path / 'plan.json'}"
    found = answer(tmp_path, "plan", "--planner=megatron", f"--write-plan={tmp_path / 'plan.json'}", dtype="bfloat16")
    slow = found["slow_format"]
    assert slow["emulated_on"] == ["Tesla-V100-SXM2-16GB", "Tesla-T4"]
    assert (slow["dtype"], slow["native"]) == ("bfloat16", "float16")
    assert slow["native_seconds"] == pytest.approx(fast)
    assert found["candidates"][0]["predicted_seconds"] > 1.3 * fast
    for command, *options in (
        ("plan", "--planner=megatron"),
        ("explain", "--planner=megatron"),
        ("explain", plan),
        ("estimate", plan),
    ):
        shown = words(call(tmp_path, command, *options, dtype="bfloat16"))
        assert NAMED in shown, command
        assert "; float16 would take " in shown, command
        assert "slow_format" in answer(tmp_path, command, *options, dtype="bfloat16")
        if plan in options:
            assert NAMED in words(call(tmp_path, command, *options)), "auto takes the format that the plan states"
        else:
            assert NAMED not in words(call(tmp_path, command, *options, dtype="float16"))


def test_comparison_states_the_price_of_a_slow_format(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL + "dtype: bfloat16\n")
    (tmp_path / "cluster.json").write_text(dumps(cluster_of({"p3.8xlarge": 1, "g4dn.12xlarge": 1})))
    given = [f"--cluster={tmp_path / 'cluster.json'}", f"--model={tmp_path / 'model.yaml'}"]
    shown = CliRunner().invoke(app, ["compare", "megatron", "random", *given])
    assert shown.exit_code == 0, shown.output
    assert NAMED in words(shown)


UNLIMITED = ["--memory-headroom=0"]


def scarce_files(folder: Path) -> list[str]:
    """Return the options of a problem that has plans in float32 alone."""
    cluster = cluster_of({"a2-highgpu-1g": 1})
    accelerators = tuple(replace(one, memory_bytes=10**9) for one in cluster.accelerators)
    (folder / "cluster.json").write_text(dumps(replace(cluster, accelerators=accelerators)))
    (folder / "model.yaml").write_text(SHORT_MODEL)
    return [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]


def json_of(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--output=json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_comparison_takes_the_work_bound_of_the_format_that_was_chosen(tmp_path: Path) -> None:
    files = scarce_files(tmp_path)
    planned = json_of("plan", "--planner=megatron", *UNLIMITED, *files)
    assert planned["dtype"] == "float32"
    (compared,) = json_of("compare", "megatron", *UNLIMITED, *files)["planners"]
    assert (compared["dtype"], compared["work_bound_seconds"]) == ("float32", planned["work_bound_seconds"])
    shown = CliRunner().invoke(app, ["compare", "megatron", *UNLIMITED, *files])
    times = planned["candidates"][0]["predicted_seconds"] / planned["work_bound_seconds"]
    assert f"takes {times:.2f} times that" in words(shown)
    assert "Number format: float32, since no plan in bfloat16 is as fast" in words(shown)


def test_trainer_without_the_format_plans_and_exports_in_one_that_it_has(tmp_path: Path) -> None:
    result = call(tmp_path, "plan", "--planner=megatron", "--expressible-by=torchtitan")
    assert "Number format: float32, the fastest of a trainer without float16 that " in words(result)
    call(tmp_path, "plan", "--planner=megatron", f"--write-plan={tmp_path / 'plan.json'}")
    exported = answer(tmp_path, "export", str(tmp_path / "plan.json"), "--to=torchtitan")
    assert 'mixed_precision_param="float32"' in exported["files"]["trainwright_recipe.py"]
    assert "float16: it has bfloat16 and float32" in exported["lost"]
    told = call(tmp_path, "export", str(tmp_path / "plan.json"), "--to=torchtitan", f"--into={tmp_path / 'titan'}")
    assert re.search(r"Predicted: \S+ m?s an iteration, \S+% (longer|shorter) than the given plan's", words(told))
    assert answer(tmp_path, "export", str(tmp_path / "plan.json"), "--to=megatron")["lost"] == []


def test_export_of_a_trainers_plan_is_priced_in_the_format_that_it_states(tmp_path: Path) -> None:
    """V100 would take float16, which torchtitan lacks: neither the plan nor its price is in that."""
    plan = tmp_path / "plan.json"
    found = answer(tmp_path, "plan", "--planner=megatron", "--runtime=torchtitan", f"--write-plan={plan}")
    assert found["dtype"] == "float32"
    stated = call(tmp_path, "export", str(plan), "--to=torchtitan")
    assert "an iteration, as planned." in words(stated)
    assert "float16" not in words(stated) + stated.stderr
    plan.write_text(documents.dumps(documents.loads(plan.read_bytes(), Plan).in_any_format))
    former = call(tmp_path, "export", str(plan), "--to=torchtitan")
    assert "The plan states no number format; it is written in float32: the fastest that" in words_of(former.stderr)
    assert "the plan is taken to be in float16." in words_of(former.stderr)


def test_format_by_name_that_the_trainer_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="dtype: torchtitan has bfloat16 and float32, got float16; give one of"):
        call(tmp_path, "plan", "--runtime=torchtitan", dtype="float16")


def test_export_is_in_the_format_of_the_devices_that_it_uses(tmp_path: Path) -> None:
    """The given plan is in float16, for all three types; torchtitan's, without stages, takes the A100s alone."""
    words = "pp4 dp1 tp4 mb8"
    exported = answer(tmp_path, "export", words, "--to=torchtitan", machines="three types")
    nodes = {device["node"] for device in exported["plan"]["pipelines"][0]["stages"][0]["devices"]}
    assert {node.rpartition("-")[0] for node in nodes} == {"p4d.24xlarge"}
    assert exported["dtype"] == "bfloat16"


@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_given_plan_is_priced_in_the_formats_of_the_trainer(tmp_path: Path, command: str) -> None:
    given = ("--plan=pp1 dp8 tp1 mb4 zero2", "--runtime=torchtitan")
    result = call(tmp_path, command, *given)
    assert "Number format: float32, the fastest of a trainer without float16 that " in words(result)
    named = call(tmp_path, command, *given, dtype="float16")
    assert "torchtitan has no float16; `dtype: auto` prices what it can run" in named.stderr
    assert "float32" in words(call(tmp_path, command, *given, dtype="bfloat16"))


def test_trial_of_a_trainer_is_compared_with_a_prediction_in_its_formats(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(dumps(TrialReport((7.3, 7.3), (1.0, 1.0), ())))
    given = ("--plan=pp1 dp8 tp1 mb4 zero2", "--runtime=torchtitan")
    tried = answer(tmp_path, "trial", *given, f"--report={report}")
    assert tried["dtype"] == "float32"
    assert tried["predicted_seconds"] == answer(tmp_path, "estimate", *given)["predicted_seconds"]


def test_plan_in_float32_for_its_memory_is_estimated_in_that_format(tmp_path: Path) -> None:
    files, plan = scarce_files(tmp_path), str(tmp_path / "plan.json")
    (best, *_) = json_of("plan", "--planner=megatron", f"--write-plan={plan}", *UNLIMITED, *files)["candidates"]
    for command in ("estimate", "explain"):
        found = json_of(command, f"--plan={plan}", *UNLIMITED, *files)
        assert (found["dtype"], found["feasible"], found["predicted_seconds"]) == (
            "float32",
            True,
            best["predicted_seconds"],
        )
        shown = CliRunner().invoke(app, [command, f"--plan={plan}", *UNLIMITED, *files])
        assert "Number format: float32, which the plan states." in words(shown)
        unstated = documents.dumps(documents.loads(Path(plan).read_bytes(), Plan).in_any_format)
        (tmp_path / "former.json").write_text(unstated)
        shown = CliRunner().invoke(app, [command, f"--plan={tmp_path / 'former.json'}", *UNLIMITED, *files])
        assert "float32, since this plan does not fit into memory in bfloat16." in words(shown)
    listed = tmp_path / "candidates.json"
    listed.write_text(json.dumps({"candidates": [best, {**best, "dtype": "bfloat16"}]}))
    for source in ([f"--candidates={listed}"], ["--planner=megatron", "--top=1", *UNLIMITED]):
        proposed = CliRunner().invoke(app, ["propose", *source, *files])
        assert proposed.exit_code == 0, proposed.output
        assert f"{best['predicted_seconds'] * 1000:.4g} ms" in words(proposed)
        assert ("1 of 2 candidates are in another number format" in proposed.stderr) == ("candidates" in source[0])


def test_plan_on_the_newest_devices_of_a_pool_is_estimated_in_their_format(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "cluster.json").write_text(dumps(cluster_of({"p3.8xlarge": 1, "a2-highgpu-4g": 1})))
    files = [f"--cluster={tmp_path / 'cluster.json'}", f"--model={tmp_path / 'model.yaml'}"]
    plan = f"--write-plan={tmp_path / 'plan.json'}"
    (best, *_) = json_of("plan", "--planner=megatron", "--spare=V100", plan, *files)["candidates"]
    found = json_of("estimate", f"--plan={tmp_path / 'plan.json'}", *files)
    assert (found["dtype"], found["predicted_seconds"]) == ("bfloat16", best["predicted_seconds"])


def test_profiles_that_are_given_fix_the_format_by_the_bytes_of_their_weights(tmp_path: Path) -> None:
    for dtype, notes in (("float32", 0), ("float16", 1)):
        profiles = tmp_path / f"{dtype}.json"
        (tmp_path / "written.yaml").write_text(MODEL + f"dtype: {dtype}\n")
        accelerators = [f"--accelerator={name}" for name in ("Tesla-V100-SXM2-16GB", "Tesla-T4")]
        options = ["profiles", "estimate", f"--model={tmp_path / 'written.yaml'}", *accelerators, f"--write={profiles}"]
        assert CliRunner().invoke(app, options).exit_code == 0
        open_format = call(tmp_path, "plan", "--planner=megatron", "--output=json", f"--profiles={profiles}")
        named = answer(tmp_path, "plan", "--planner=megatron", f"--profiles={profiles}", dtype=dtype)
        assert json.loads(open_format.stdout)["candidates"] == named["candidates"]
        assert open_format.stderr.count("dtype auto: taken as float16") == notes


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_candidates_with_their_format_are_read_again(tmp_path: Path, dtype: str) -> None:
    listed = tmp_path / "candidates.json"
    listed.write_text(call(tmp_path, "plan", "--planner=megatron", "--output=json", dtype=dtype).stdout)
    shown = words(call(tmp_path, "propose", f"--candidates={listed}", dtype=dtype))
    assert (NAMED in shown) == (dtype == "bfloat16")


def test_slow_format_is_not_priced_for_a_plan_that_leaves_out_those_that_emulate_it() -> None:
    cluster = cluster_of({"p3.8xlarge": 1, "a2-highgpu-4g": 1})
    v100, a100 = (accelerator.name for accelerator in cluster.accelerators)
    slow = SlowFormat(Dtype.BFLOAT16, (v100,), 0.5908, 32, Dtype.FLOAT16, other=None)
    left_out, used = (slow_format(slow, cluster, names) for names in ([a100], [a100, v100]))
    assert left_out.sentences == ("bfloat16 is emulated on V100, which the plan leaves out.",)
    assert used.sentences == ("bfloat16 is emulated on V100: 590.8 ms; float16 is native there.",)
    assert left_out.fields == used.fields
