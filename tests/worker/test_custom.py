"""User models: described from their layers, planned from the description, and trained under the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from random_plans import random_plan
from torchvision.models import resnet18
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.families import Custom
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.search import SEARCHES
from trainwright.training import Training
from trainwright.worker_api import FailureReason, ProfilingTask, TrialTask
from trainwright_operator.api.model import ModelSpec
from trainwright_worker import describe as command
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.measure.layer_under_test import activation_bytes
from trainwright_worker.model_description.description import describe

ORACLES = Path(__file__).with_name("oracles")
GANG = Path(__file__).with_name("equivalence_gang.py")
RESNET, BERT = "outside_models:resnet18", "outside_models:distilbert"


@pytest.fixture(scope="module")
def resnet() -> Custom:
    return describe(RESNET, check_seconds=0)


@pytest.fixture(scope="module")
def bert() -> Custom:
    return describe(BERT, check_seconds=0)


def test_description_of_torchvisions_resnet_lists_its_layers(resnet: Custom) -> None:
    model = Model.of(resnet)
    assert model.parameters == sum(one.numel() for one in resnet18(num_classes=10).parameters())
    assert resnet.layers[:5] == ("Stem", "BasicBlock", "BasicBlock", "BasicBlock2", "BasicBlock3")
    block = model.kind("BasicBlock")
    assert block.forward_flops_per_row == 2 * 2 * (16 * 16) * 64 * 64 * 9
    assert block.output_elements_per_row == 64 * 16 * 16
    # Two convolutions, two normalisations and two ReLUs: their five different inputs and the last output.
    assert block.saved_bytes_per_row(Dtype.FLOAT32) == 5 * 4 * 64 * 16 * 16
    assert block.saved_bytes_per_row(Dtype.FLOAT16) == 5 * 2 * 64 * 16 * 16
    assert model.max_tensor_degree == 1
    assert not any(kind.is_tensor_parallel for kind in model.kinds)


@pytest.mark.parametrize(("entrypoint", "tolerance"), [(RESNET, 0.0), (BERT, 0.15)])
def test_counts_on_the_meta_device_equal_a_real_forward(entrypoint: str, tolerance: float) -> None:
    """Attention is excluded: its kernels store different tensors on different devices."""
    model = Model.of(describe(entrypoint, check_seconds=0))
    layers = make_family_layers(model)

    def kept(number: int, rows: int) -> int:
        layer = layers.make(number, seed=0, shard=TensorShard(), shared={})
        shapes = layers.boundary(number - 1) if number else ()
        boundary = tuple(torch.randn(rows, *shape, requires_grad=True) for shape in shapes)
        data = layers.rows(layer.reads, seed=0, iteration=0, first=0, count=rows) if layer.reads else {}
        return activation_bytes(lambda: layer(boundary, data), layer.parameters(), (*boundary, *data.values()))

    for kind in model.kinds:
        number = model.layers.index(kind.name)
        of_a_row = (kept(number, 8) - kept(number, 3)) / 5
        assert kind.saved_bytes_per_row(Dtype.FLOAT32) == pytest.approx(of_a_row, rel=tolerance), kind.name


def test_the_example_is_torchvisions_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ORACLES.parents[2] / "deploy" / "examples" / "custom")
    described = describe("resnet:resnet18", check_seconds=0)
    assert Model.of(described).parameters == 11_689_512  # as published
    assert len(described.layers) == 10
    flops = sum(Model.of(described).kind_of(layer).forward_flops_per_row for layer in range(10))
    assert flops == pytest.approx(2 * 1.814e9, rel=0.01)  # multiply-adds as torchvision states them


@pytest.mark.timeout(300)
def test_training_plan_of_the_example_matches_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ORACLES.parents[2] / "deploy" / "examples" / "custom" / "encoder"
    monkeypatch.syspath_prepend(folder)
    spec = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))["spec"]
    assert ModelSpec.model_validate(spec["model"]).family == describe("encoder:encoder")


def test_image_of_the_example_installs_a_matching_library() -> None:
    dockerfile = ORACLES.parents[2] / "deploy" / "examples" / "custom" / "Dockerfile"
    assert f"TORCHVISION={version('torchvision').partition('+')[0]}\n" in dockerfile.read_text(encoding="utf-8")


@pytest.mark.timeout(300)
def test_equal_layers_share_a_kind(bert: Custom) -> None:
    assert bert.layers == ("BertEmbeddings", "BertBlock", "BertBlock", "BertHead")
    assert [kind.output_elements_per_row for kind in bert.kinds] == [12 * 32 + 12, 12 * 32 + 12, 1]


@pytest.mark.timeout(300)
def test_the_command_writes_what_a_model_file_and_what_a_training_plan_takes(monkeypatch, capsys, bert) -> None:
    monkeypatch.setattr(sys, "argv", ["describe", BERT, "--check-seconds", "0"])
    assert command.main() == 0
    written = yaml.safe_load(capsys.readouterr().out)
    assert documents.parse({"dtype": "float32", **written, "global_batch_size": 8}, Training).family == bert
    monkeypatch.setattr(sys, "argv", ["describe", BERT, "--training-plan", "--check-seconds", "0"])
    assert command.main() == 0
    assert ModelSpec.model_validate(yaml.safe_load(capsys.readouterr().out)).family == bert
    monkeypatch.setattr(sys, "argv", ["describe", "outside_models:vgg"])
    assert command.main() == 2
    assert "has no function vgg" in capsys.readouterr().err


def test_describe_names_the_missing_extra_when_only_the_planner_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["describe", BERT, "--check-seconds", "0"])
    monkeypatch.delitem(sys.modules, "trainwright_worker.model_description.description")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command.main() == 2
    told = capsys.readouterr()
    assert "there is no module torch here" in told.err
    assert "pip install '.[worker]'" in told.err
    assert not told.out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda found: replace(found, layers=found.layers[1:], kinds=found.kinds[1:], checks=None),
            "it has 4 layers, not 3",
        ),
        (
            lambda found: replace(found, kinds=(replace(found.kinds[0], parameters=7), *found.kinds[1:])),
            "layer 0 .BertEmbeddings. holds 2048 values, not 7",
        ),
        (
            lambda found: replace(found, kinds=(replace(found.kinds[0], output_elements_per_row=9), *found.kinds[1:])),
            "layer 0 .BertEmbeddings. outputs 396 values per row, not 9",
        ),
        (
            lambda found: replace(found, kinds=(replace(found.kinds[0], output_bytes_per_row=9), *found.kinds[1:])),
            "layer 0 .BertEmbeddings. outputs 0 bytes of integers per row, not 9",
        ),
        (
            lambda found: replace(found, keep_float32=("mask",)),
            "it keeps no field in float32, not mask; describe it again",
        ),
        (lambda found: replace(found, entrypoint="outside_models:vgg"), "has no function vgg"),
    ],
)
def test_model_other_than_described_is_refused(bert: Custom, change, told: str) -> None:
    with pytest.raises(WorkerError, match=told) as refusal:
        make_family_layers(Model.of(change(bert)))
    assert refusal.value.reason is FailureReason.ORDER_INVALID


def model_file(folder: Path, family: Custom, batch: int) -> Path:
    path = folder / "model.json"
    path.write_text(documents.dumps(Training(batch, custom=family)), encoding="utf-8")
    return path


@pytest.mark.parametrize("planner", SEARCHES)
def test_every_planner_plans_a_custom_model_without_tensor_degrees(
    tmp_path: Path, resnet: Custom, planner: str
) -> None:
    runner = CliRunner()
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(runner.invoke(app, ["cluster", "p3.8xlarge=1"]).stdout)
    inputs = ["--cluster", str(cluster), "--model", str(model_file(tmp_path, resnet, 16))]
    done = runner.invoke(app, ["plan", *inputs, "--planner", planner, "--output", "json", "--top", "3"])
    assert done.exit_code == 0, done.stderr
    for candidate in json.loads(done.stdout)["candidates"]:
        plan = documents.parse(candidate["plan"], Plan)
        runs = [run for pipeline in plan.pipelines for stage in pipeline.stages for run in stage.layers]
        assert {run.strategy.tensor for run in runs} == {1}


@pytest.mark.torch_processes
@pytest.mark.timeout(300)
def test_plans_over_two_processes_have_the_gradients_of_one_process(tmp_path: Path, resnet, bert) -> None:
    cases = []
    for family, seed, by_piece in ((resnet, 12, True), (resnet, 25, True), (bert, 25, False), (bert, 30, False)):
        plan = random_plan(seed, layers=len(family.layers), tensor_degrees=(1,), devices=2)
        assert len(plan.devices) == 2
        model = documents.dump(Training(1, custom=family))
        kept = {"custom": model["custom"]}
        cases.append({"name": f"{seed}", "plan": documents.dump(plan), "model": kept, "by_piece": by_piece})
    shapes = {(len(plan["pipelines"]), len(plan["pipelines"][0]["stages"])) for plan in (one["plan"] for one in cases)}
    assert shapes == {(1, 1), (1, 2), (2, 1)}  # replicas, stages, pipelines
    given, result = tmp_path / "cases.json", tmp_path / "result.json"
    given.write_text(json.dumps(cases), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(GANG), str(given), str(result)],
        check=False, capture_output=True, text=True, timeout=280,
        env={"GANG_WORLD": "2", "PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for answer in json.loads(result.read_text(encoding="utf-8")):
        assert answer["missing"] == []
        assert answer["loss_error"] < 1e-5
        assert answer["gradient_error"] < 1e-4, answer


@pytest.mark.torch_processes
@pytest.mark.timeout(300)
def test_custom_model_is_profiled_planned_and_tried(tmp_path: Path, worker, make, bert: Custom) -> None:
    model = Model.of(bert)
    profiled = worker.end(worker.start(ProfilingTask(make.gang(1), model, 1, (1, 2, 4), iterations=3), "local"))
    assert profiled.code == 0, profiled.errors
    (report,) = profiled.reports
    assert {layer.kind for layer in report.layers} == {kind.name for kind in bert.kinds}
    profiles, cluster = tmp_path / "profiles.json", tmp_path / "cluster.yaml"
    profiles.write_text(documents.dumps(Profiles(report.layers)), encoding="utf-8")
    cluster.write_text(
        "accelerators: [{name: cpu, memory_bytes: 1000000000}]\n"
        "nodes: [{name: node-a, accelerator: cpu, devices: 2, inside: {latency_seconds: 0.0001, "
        "bandwidth_bytes_per_second: 1000000000}}]\n"
    )
    inputs = ["--cluster", str(cluster), "--model", str(model_file(tmp_path, bert, 8)), "--profiles", str(profiles)]
    planned = CliRunner().invoke(app, ["plan", *inputs, "--planner", "amp", "--output", "json"])
    assert planned.exit_code == 0, planned.output
    plans = [documents.parse(one["plan"], Plan) for one in json.loads(planned.stdout)["candidates"]]
    plan = next(plan for plan in plans if len(plan.devices) == 2)
    assert plan.devices == (Device("node-a", 0), Device("node-a", 1))
    order = TrialTask(make.gang(2), model, plan, warmup_iterations=1, iterations=3)
    tried = worker.end(worker.start(order, "local"))
    assert tried.code == 0, tried.errors
    assert len(tried.reports[0].iteration_seconds) == 3
    assert len(tried.reports[0].memory) == 2


@pytest.mark.torch_processes
def test_missing_user_package_is_named(worker, make, bert: Custom) -> None:
    absent = replace(bert, entrypoint="absent_models:distilbert")
    outcome = worker.local(ProfilingTask(make.gang(1), Model.of(absent), 1, (1,)))
    assert outcome.reasons == {"OrderInvalid"}
    assert (
        "has no module absent_models; bring it into the worker's image or into a volume" in outcome.failures[0].message
    )
