"""Commands that write documents: clusters of machines, profiles, runtimes; and plans from data sheets alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.accelerators import cluster_of, data_sheets, estimate_profiles, machines
from trainwright.calibration import Trial, Trials
from trainwright.cli import app
from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Problem, run

MODEL = """
gpt: {layers: 4, hidden_size: 256, heads: 4, sequence_length: 128, vocabulary_size: 1024}
global_batch_size: 8
dtype: float16
"""

runner = CliRunner()


def call(*arguments: object) -> Result:
    return runner.invoke(app, [str(argument) for argument in arguments])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("trainwright: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a mixed cluster and a model."""
    (tmp_path / "cluster.yaml").write_text(call("cluster", "p3.8xlarge=1", "g4dn.12xlarge=1").stdout)
    (tmp_path / "model.yaml").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_cluster_writes_a_document_of_machines(form: str) -> None:
    result = call("cluster", "p3.8xlarge=2", "g4dn.12xlarge=1", "p3.8xlarge=1", "--output", form)
    assert result.exit_code == 0, result.output
    assert documents.loads(result.stdout, Cluster) == cluster_of({"p3.8xlarge": 3, "g4dn.12xlarge": 1})


@given(text=st.text(max_size=12))
def test_cluster_refuses_an_unknown_machine(text: str) -> None:
    result = runner.invoke(app, ["cluster", "--", text])
    assert result.exit_code == 2
    assert "expected MACHINE=COUNT" in result.stderr or "no data sheet for" in result.stderr


@pytest.mark.parametrize(
    ("machines_given", "told"),
    [(["p5.48xlarge=1", "dgx-h100=1"], True), (["p5.48xlarge=1"], False), (["dgx-h100=1"], False)],
)
def test_cluster_tells_whose_missing_price_takes_that_of_others(machines_given: list[str], told: bool) -> None:
    result = call("cluster", *machines_given)
    assert ("NVIDIA-H100-80GB-HBM3 has no price in this cluster, since dgx-h100 has none" in result.stderr) == told


def test_machines_and_accelerators_are_listed_with_their_sources() -> None:
    assert all(machine.accelerator[:8] in call("machines").stdout for machine in machines())
    listed = json.loads(call("accelerators", "--output", "json").stdout)
    assert [sheet["name"] for sheet in listed] == [sheet.name for sheet in data_sheets()]
    assert "https://" in call("accelerators", "t4").stdout
    assert "https://" in call("machines", "p3.8xlarge").stdout
    assert "no data sheet for" in refused(call("accelerators", "abacus"))


def test_plan_estimates_profiles_and_reports_it_when_none_are_given(folder: Path) -> None:
    given_files = ["--cluster", folder / "cluster.yaml", "--model", folder / "model.yaml"]
    planner = ["--planner", "amp"]
    result = call("plan", *given_files, *planner)
    assert "(profiles estimated)" in result.stdout
    assert "estimated from data sheets, not measured" in result.stderr
    answer = json.loads(call("plan", *given_files, *planner, "--top", 1, "--output", "json").stdout)
    assert answer["profiles"] == "estimated"
    written = folder / "profiles.json"
    call("profiles", "estimate", *given_files, "--write", written)
    again = json.loads(
        call("plan", *given_files, *planner, "--profiles", written, "--top", 1, "--output", "json").stdout
    )
    assert again["candidates"] == answer["candidates"]
    assert again["profiles"] == "estimated"
    assert "(profiles estimated)" in call("compare", "megatron", *given_files).stdout
    assert "(profiles estimated)" in call("explain", *given_files, *planner).stdout


def test_profiles_are_required_when_an_accelerator_has_no_data_sheet(folder: Path) -> None:
    text = (folder / "cluster.yaml").read_text().replace("Tesla-T4", "Abacus-9000")
    (folder / "cluster.yaml").write_text(text)
    result = call("plan", "--cluster", folder / "cluster.yaml", "--model", folder / "model.yaml")
    assert "cluster.yaml: no data sheet for accelerator 'Abacus-9000'" in refused(result)


def test_imported_tables_become_profiles(folder: Path) -> None:
    table = {"1": {"1": {str(layer): [0.001, 0.002, 0.0005] for layer in range(6)}}}
    (folder / "table.json").write_text(json.dumps(table))
    given_options = ["--model", folder / "model.yaml", "--accelerator", "Tesla-T4", folder / "table.json"]
    result = call("profiles", "import", "--format", "sailor", *given_options)
    assert result.exit_code == 0, result.output
    found = documents.loads(result.stdout, Profiles)
    assert {layer.accelerator for layer in found.layers} == {"Tesla-T4"}
    assert "choose one of sailor, metis, amp" in refused(call("profiles", "import", "--format", "csv", *given_options))
    for option in ("--inside-bandwidth", "--inside-latency"):
        odd = call(
            "profiles", "import", "--format", "sailor", "--inside-bandwidth", "1e9", option, "nan", *given_options
        )
        assert "must be finite" in refused(odd)
    assert "--blocks: expected a whole number" in refused(
        call("profiles", "import", "--format", "amp", "--blocks", "a:b", *given_options)
    )


def test_merged_profiles_take_a_point_from_the_first_file_that_has_it(
    tmp_path: Path, make_problem: Callable[..., Problem]
) -> None:
    whole = make_problem().profiles
    slow = tuple(replace(layer, forward_seconds=9.0) for layer in whole.layers)
    (tmp_path / "first.json").write_text(documents.dumps(Profiles(whole.layers[:3])))
    (tmp_path / "second.json").write_text(documents.dumps(Profiles(slow, "estimated")))
    result = call("profiles", "merge", tmp_path / "first.json", tmp_path / "second.json")
    found = documents.loads(result.stdout, Profiles)
    assert set(found.layers) == {*whole.layers[:3], *slow[3:]}
    assert found.origin == "estimated"
    assert "the whole document is marked so" in result.stderr


def test_profiles_are_estimated_for_accelerators_by_name(folder: Path) -> None:
    result = call("profiles", "estimate", "--model", folder / "model.yaml", "--accelerator", "Tesla-T4")
    found = documents.loads(result.stdout, Profiles)
    assert found.origin == "estimated"
    assert {layer.tensor_degree for layer in found.layers} == {1, 2, 4}
    assert "give --cluster or --accelerator" in refused(call("profiles", "estimate", "--model", folder / "model.yaml"))


def test_profiles_under_another_name_of_a_data_sheet_plan_the_same(folder: Path, tmp_path: Path) -> None:
    asked = ("profiles", "estimate", "--model", folder / "model.yaml", "--write")
    files = (
        "--cluster",
        folder / "cluster.yaml",
        "--model",
        folder / "model.yaml",
        "--planner",
        "megatron",
        "--output=json",
    )
    as_cluster, in_short = tmp_path / "as_cluster.json", tmp_path / "in_short.json"
    call(*asked, as_cluster, "--cluster", folder / "cluster.yaml")
    call(*asked, in_short, "--accelerator", "T4", "--accelerator", "V100")
    expected = json.loads(call("plan", *files, "--profiles", as_cluster).stdout)
    answer = call("plan", *files, "--profiles", in_short)
    assert "the profiles of T4 are taken for Tesla-T4, which has the same data sheet" in answer.stderr
    assert json.loads(answer.stdout)["candidates"] == expected["candidates"]


def test_profiles_are_estimated_when_the_model_file_has_no_batch(folder: Path) -> None:
    asked = ("profiles", "estimate", "--model", folder / "model.yaml", "--accelerator", "Tesla-T4")
    named = call(*asked).stdout
    (folder / "model.yaml").write_text(MODEL.replace("global_batch_size: 8", ""))
    assert call(*asked).stdout == named


def test_calibration_writes_a_runtime_that_predicts_the_trials(
    tmp_path: Path, make_problem: Callable[..., Problem]
) -> None:
    problem = make_problem()
    plans = [candidate.plan for candidate in run("amp", problem, top=6)]
    truth = Runtime(constant_seconds=0.5, link_ratio=0.8)
    setting = replace(problem, runtime=truth).cost_context
    trials = Trials(tuple(Trial(plan, estimate_with_context(plan, setting).iteration_seconds) for plan in plans))
    for name, noun in (("cluster", problem.cluster), ("profiles", problem.profiles), ("trials", trials)):
        (tmp_path / f"{name}.json").write_text(documents.dumps(noun))
    (tmp_path / "model.yaml").write_text(
        "gpt: {layers: 12, hidden_size: 128, heads: 4, sequence_length: 64, vocabulary_size: 1000}\nglobal_batch_size: 16"
    )
    files = [f"--{name}={tmp_path / name}.json" for name in ("cluster", "profiles", "trials")]
    files.append(f"--model={tmp_path / 'model.yaml'}")
    to_output, into_file = call("calibrate", *files), call("calibrate", *files, "--write", tmp_path / "runtime.json")
    assert into_file.exit_code == 0, into_file.output
    assert documents.loads(to_output.stdout, Runtime) == documents.loads(
        (tmp_path / "runtime.json").read_text(), Runtime
    )
    assert "for trials that the fit did not see" in " ".join(into_file.stdout.split())
    searched = call("calibrate", *files, "--global-batch-size", "search")
    assert "--global-batch-size cannot be `search`" in refused(searched)
    found = documents.loads(to_output.stdout, Runtime)
    for trial in trials.trials:
        fitted = estimate_with_context(trial.plan, replace(problem, runtime=found).cost_context).iteration_seconds
        plain = estimate_with_context(trial.plan, problem.cost_context).iteration_seconds
        assert abs(fitted - trial.iteration_seconds) < abs(plain - trial.iteration_seconds) / 2


def profiled(folder: Path, model: str, asked: str) -> Result:
    """`plan` of one model with the profiles of another."""
    cluster, profiles = folder / "cluster.yaml", folder / "profiles.json"
    for name, text in (("profiled", model), ("asked", asked)):
        (folder / f"{name}.yaml").write_text(f"{text}\nglobal_batch_size: 4\n")
    call("profiles", "estimate", "--model", folder / "profiled.yaml", "--cluster", cluster, "--write", profiles)
    return planned(folder)


def planned(folder: Path) -> Result:
    names = (("cluster", "cluster.yaml"), ("model", "asked.yaml"), ("profiles", "profiles.json"))
    return call("plan", "--planner", "amp", *(f"--{option}={folder / name}" for option, name in names))


def gpt(hidden: int = 64, more: str = "") -> str:
    return f"gpt: {{layers: 2, hidden_size: {hidden}, heads: 4, sequence_length: 16, vocabulary_size: 100}}\n{more}"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (gpt(), None),
        (gpt(72), "check that they are of this model"),
        (gpt(256), "check that they are of this model"),
        (gpt(more="dtype: float16"), "take twice the bytes of this model's in float16"),
    ],
)
def test_warning_names_profiles_of_another_model_or_number_format(folder: Path, asked: str, told: str | None) -> None:
    result = profiled(folder, gpt(more="dtype: float32"), asked)
    assert result.exit_code == 0, result.output
    assert told in result.stderr if told else not result.stderr


@pytest.mark.parametrize(("machine", "is_told"), [("p3.8xlarge", True), ("g4dn.12xlarge", False)])
def test_warning_names_the_accelerators_whose_profiles_are_of_another_number_format(
    tmp_path: Path, machine: str, is_told: bool
) -> None:
    """Accelerators that the cluster lacks do not count."""
    sizes: dict[str, Any] = {"tensor_degrees": (1, 2, 4), "rows": (1, 2, 4)}
    half, full = (Model.of(Gpt(2, 64, 4, 16, 100), dtype) for dtype in (Dtype.FLOAT16, Dtype.FLOAT32))
    profiles = [
        estimate_profiles(half, ["Tesla-T4"], **sizes),
        estimate_profiles(full, ["Tesla-V100-SXM2-16GB"], **sizes),
    ]
    (tmp_path / "profiles.json").write_text(documents.dumps(Profiles(profiles[0].layers + profiles[1].layers)))
    (tmp_path / "cluster.yaml").write_text(documents.dumps(cluster_of({machine: 1, "g4dn.12xlarge": 1})))
    (tmp_path / "asked.yaml").write_text(gpt(more="dtype: float16\nglobal_batch_size: 4\n"))
    told = "the profiles on Tesla-V100-SXM2-16GB take twice the bytes of this model's in float16"
    assert (told in " ".join(planned(tmp_path).stderr.split())) == is_told


def test_warning_names_an_accelerator_with_layers_in_several_number_formats(folder: Path) -> None:
    profiled(folder, gpt(more="dtype: float16"), gpt(more="dtype: float16"))
    document = json.loads((folder / "profiles.json").read_text())
    for layer in document["layers"]:
        layer["parameter_bytes"] *= 1 + (layer["kind"] == "block" and layer["accelerator"] == "Tesla-V100-SXM2-16GB")
    (folder / "profiles.json").write_text(json.dumps(document))
    result = planned(folder)
    assert result.exit_code == 0, result.output
    told = "the weights of the profiles on Tesla-V100-SXM2-16GB are in several number formats, by their bytes"
    assert told in " ".join(result.stderr.split())


def llama(length: int, more: str = "") -> str:
    sizes = "layers: 2, hidden_size: 64, heads: 4, intermediate_size: 128, vocabulary_size: 100"
    return f"llama: {{{sizes}, sequence_length: {length}}}\ndtype: float16\n{more}"


@pytest.mark.parametrize(
    ("measured", "asked", "told"),
    [
        (llama(256), llama(256), None),
        (llama(256), llama(512), "the profiles' embedding, block, head hold 0.5 times the activations of this model's"),
        (
            llama(256),
            llama(128),
            "head hold 2 times the activations of this model's for each row; check that they are in bytes",
        ),
        (llama(256, "attention: stored"), llama(256), None),
        (llama(256), llama(256, "attention: stored"), None),
    ],
)
def test_warning_names_profiles_of_another_sequence_length_but_not_of_other_kernels(
    folder: Path, measured: str, asked: str, told: str | None
) -> None:
    result = profiled(folder, measured, asked)
    assert result.exit_code == 0, result.output
    assert told in result.stderr if told else not result.stderr


def test_profiles_that_exceed_the_peak_of_an_accelerator_many_times_are_refused(folder: Path) -> None:
    """Their times are in another unit, or they are of a far smaller model."""
    profiled(folder, gpt(more="dtype: float16"), gpt(more="dtype: float16"))
    document = json.loads((folder / "profiles.json").read_text())
    for layer in document["layers"]:
        layer["forward_seconds"] *= 1e-6
        layer["backward_seconds"] *= 1e-6
    (folder / "profiles.json").write_text(json.dumps(document))
    told = refused(planned(folder))
    assert "profiles.json: by the profiles' forward_seconds and backward_seconds, Tesla-" in told
    assert "give the profiles of this model, with their times in seconds" in told


def test_profiles_whose_computing_layers_take_no_time_are_refused(folder: Path) -> None:
    profiled(folder, gpt(), gpt())
    document = json.loads((folder / "profiles.json").read_text())
    for layer in document["layers"]:
        layer["forward_seconds"] *= layer["kind"] != "embedding"
    (folder / "profiles.json").write_text(json.dumps(document))
    assert planned(folder).exit_code == 0  # a look-up may take less than a clock's tick
    number = next(number for number, layer in enumerate(document["layers"]) if layer["kind"] == "block")
    document["layers"][number]["forward_seconds"] = 0
    (folder / "profiles.json").write_text(json.dumps(document))
    told = refused(planned(folder))
    assert f"profiles.json: layers.{number}.forward_seconds: block on " in told
    assert "computes, so it takes more than 0 s" in told


def test_profiles_of_other_kinds_of_layers_are_refused(folder: Path) -> None:
    t5 = "t5: {layers: 2, hidden_size: 64, heads: 4, sequence_length: 16, vocabulary_size: 100}"
    told = refused(profiled(folder, gpt(), t5))
    assert "profiles.json: the model of" in told
    assert "layers of kind encoder, decoder_embedding, decoder, but the profiles are of embedding, block, head" in told


def test_warning_names_profiles_of_unknown_layer_kinds(folder: Path) -> None:
    profiled(folder, gpt(), gpt())
    document = json.loads((folder / "profiles.json").read_text())
    document["layers"] += [{**layer, "kind": "decoder"} for layer in document["layers"] if layer["kind"] == "block"]
    (folder / "profiles.json").write_text(json.dumps(document))
    result = planned(folder)
    assert result.exit_code == 0, result.output
    assert "have layers of kind decoder, which this model lacks" in result.stderr
