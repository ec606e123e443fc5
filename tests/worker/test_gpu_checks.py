"""The program of `make test-gpu`, tried on the CPU at tiny sizes: what it finds out there says nothing about a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_checks import __main__ as program
from gpu_checks import family_layers, plan_ranks
from gpu_checks.findings import Finding, Verdict, judged, predicted
from gpu_checks.hardware import Hardware
from gpu_checks.plan_ranks import GivenPlan
from gpu_checks.running import Subject, find_within
from trainwright import documents
from trainwright.cluster import Device
from trainwright.families import Llama
from trainwright.layer import Attention, Dtype
from trainwright.timeline import Action, Moment
from trainwright.training import Training

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("planner", "operator", "profiler-image", "benchmarks", "tests/worker/oracles")


@pytest.mark.torch_processes
@pytest.mark.timeout(180)
def test_program_measures_every_way_when_started_on_a_cpu(tmp_path: Path) -> None:
    """A block is timed, processes share a device, and ranks of plans run alone after a profile by the worker's command."""
    table = tmp_path / "table.md"
    command = [sys.executable, "benchmarks/gpu_checks", "--device", "cpu", "--small", "--write", str(table)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--only", "ceilings", "block", "dropout", "gang", "ranks"], check=False, capture_output=True, text=True,
        cwd=ROOT, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))["findings"]
    checks = ("dropout", "gang", "ranks")
    verdicts = {check: {one["verdict"] for one in found if one["check"] == check} for check in checks}
    assert verdicts == {"dropout": {"ok"}, "gang": {"ok"}, "ranks": {"ok", "skipped"}}
    assert {one["verdict"] for one in found if one["check"] in {"ceilings", "block"}} == {"skipped"}
    lines = table.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(found) + 2


@pytest.mark.slow
@pytest.mark.torch_processes
@pytest.mark.timeout(300)
def test_gangs_of_several_nodes_share_a_device(tmp_path: Path) -> None:
    """On a CPU the gangs use gloo: plans agree, and a stopped process and a lost node are named."""
    table = tmp_path / "table.md"
    command = [sys.executable, "benchmarks/gpu_checks", "--device", "cpu", "--small", "--write", str(table)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--only", "shared"], check=False, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))["findings"]
    assert [one["verdict"] for one in found].count("ok") == len(found) - 1  # no network is like the loopback


def test_program_skips_with_one_sentence_when_torch_sees_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_checks"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert program.main() == 0
    assert capsys.readouterr().out.startswith("skipped: torch sees no GPU here")


def test_plan_of_a_file_gets_the_ranks_that_are_named(tmp_path: Path, make) -> None:
    devices = tuple(Device("node", slot) for slot in range(4))
    plan, model = tmp_path / "plan.json", tmp_path / "model.yaml"
    plan.write_text(documents.dumps(make.plan(devices, data=2)), encoding="utf-8")
    model.write_text(documents.dumps(Training(8, gpt=make.gpt)), encoding="utf-8")
    hardware = Hardware("cpu", True, tmp_path)

    def subjects(*ranks: int) -> list[str]:
        return [one.name for one in GivenPlan.read(plan, model, ranks).subjects(hardware)]

    assert subjects(3) == ["bfloat16 plan, rank 3"]
    assert subjects() == ["bfloat16 plan, rank 0", "bfloat16 plan, rank 2"]
    with pytest.raises(ValueError, match="--rank: the plan has ranks 0 to 3, got 4"):
        subjects(4)
    model.write_text(documents.dumps(Training(8, gpt=replace(make.gpt, layers=3))), encoding="utf-8")
    with pytest.raises(ValueError, match=r"the plan is for a model of 4 layers, but that of .*model.yaml has 5"):
        subjects()
    model.write_text(documents.dumps(Training(8, gpt=make.gpt, attention=Attention.STORED)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"model.yaml: attention: the worker computes fused attention alone"):
        subjects()
    plan.write_text(documents.dumps(make.plan(devices, tensor=4)), encoding="utf-8")
    model.write_text(documents.dumps(Training(8, gpt=replace(make.gpt, heads=2))), encoding="utf-8")
    with pytest.raises(ValueError, match=r"plan.json: layers 0…3: tensor degree 4 does not divide the model"):
        subjects()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_layers_have_the_cpus_gradients_when_the_device_is_the_cpu(tmp_path: Path, dtype: Dtype) -> None:
    llama = Llama(1, 32, 4, 12, 50, intermediate_size=48, key_value_heads=2)
    gradients, kept, attention = family_layers.findings_of_family(Hardware("cpu", True, tmp_path), llama, dtype)
    assert gradients.verdict is Verdict.OK
    assert gradients.subject == f"llama, {dtype}: gradients"
    assert {kept.verdict, attention.verdict} == {Verdict.SKIPPED}
    assert attention.measured == "flash"


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.04, "ok"), (-0.07, "ok: above the aim of 5%"), (0.11, "fails"), (float("nan"), "fails")]
)
def test_prediction_fails_when_it_is_beyond_its_limit(error: float, verdict: str) -> None:
    assert predicted("plan", ("1 s", "1.04 s"), error, aim=0.05, limit=0.10).verdict_text == verdict


def test_compute_of_a_rank_leaves_out_the_gathers_within() -> None:
    """The fake process group copies a gathered weight, once for each of its ranks."""
    passes = (
        Moment(Action.FORWARD, 0, 0, 100),
        Moment(Action.GATHER, -1, 0, 30),
        Moment(Action.TENSOR_SUM, -1, 50, 10),
    )
    after = (
        Moment(Action.BACKWARD, 0, 100, 200),
        Moment(Action.GRADIENTS, -1, 250, 20),
        Moment(Action.UPDATE, -1, 300, 9),
    )
    assert plan_ranks.computing_seconds((*passes, *after)) == pytest.approx(250e-6)


def test_check_goes_on_when_a_subject_raises() -> None:
    fine = judged("fine", "1", "1", holds=True)

    def broken() -> list[Finding]:
        raise RuntimeError("CUDA error:\nan illegal memory access")

    found = list(find_within([Subject("broken", broken), Subject("fine", lambda: [fine])], budget_seconds=60))
    assert [one.verdict for one in found] == [Verdict.FAILS, Verdict.OK]
    assert found[0].reason == "RuntimeError: CUDA error: an illegal memory access"


def test_check_says_what_it_left_out_when_its_budget_is_spent() -> None:
    (found,) = find_within([Subject("late", list)], budget_seconds=0)
    assert found.verdict_text == "skipped because the budget of 0 s is spent"
