"""Trainers that the executor is compared with: their layers compute what the executor's do, and their losses agree."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from one_process import OneProcess
from source_files import ROOT

from trainers.plans import MODELS
from trainers.torch_models import StageModel

SEED, ROWS = 3, 2
TORCHTITAN = "torchtitan==0.3.0"
NO_INDEX = 3
"""Exit status of trainer_venvs.sh where no package index is reachable."""


@pytest.mark.parametrize("name", MODELS)
def test_modules_of_torch_compute_the_losses_and_gradients_of_the_executors_layers(name: str) -> None:
    model = MODELS[name]
    ours = OneProcess(model, seed=SEED)
    theirs = StageModel(model, range(len(model.layers)), SEED)
    rows = ours.family.rows(("tokens", "targets"), seed=SEED, iteration=0, first=0, count=ROWS)
    wanted, found = ours.loss(0, ROWS), theirs(rows["tokens"], rows["targets"]).sum() / ROWS
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    wanted.backward()
    found.backward()
    for number, layer in enumerate(ours.layers):
        gradients = SimpleNamespace(get_parameter=lambda weight, layer=layer: layer.get_parameter(weight).grad)
        for parameter, gradient in theirs.parts[str(number)].weights(gradients).items():
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
@pytest.mark.torch_processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trainer", ["torch", "torchtitan"])
def test_losses_agree_under_every_plan(trainer: str) -> None:
    interpreter = sys.executable
    if trainer == "torchtitan":
        script = ROOT / "deploy" / "development" / "trainer_venvs.sh"
        made = subprocess.run([script, TORCHTITAN], capture_output=True, text=True, check=False)
        if made.returncode == NO_INDEX:
            pytest.skip(f"{TORCHTITAN} cannot be installed here: no package index can be reached")
        assert made.returncode == 0, made.stderr[-4000:]
        interpreter = made.stdout.split()[1]
    folders = os.pathsep.join(str(ROOT / folder) for folder in ("benchmarks", "planner", "profiler-image"))
    arguments = [ROOT / "benchmarks" / "trainers", "--trainer", trainer, "--rounds", "1"]
    done = subprocess.run(
        [interpreter, *arguments],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
