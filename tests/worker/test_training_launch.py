"""The example's training script, started by the exported launch.sh, killed, and resumed under another plan."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from source_files import ROOT

from trainwright import documents
from trainwright.cluster import Device
from trainwright.exports import TARGETS, ExportRequest
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright.training import Training
from trainwright_worker.model_description.description import describe

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(300)]

LAYERS, ROWS, ITERATIONS, EVERY = 8, 4, 24, 3
EXAMPLES = ROOT / "deploy" / "examples" / "custom"
NODE = "node-a"
DEVICES = Device(NODE, 0), Device(NODE, 1)


def plan(*stages: Stage) -> Plan:
    return Plan(LAYERS, 2 * ROWS, (Pipeline(2, ROWS, stages),))


ALONE = plan(Stage(DEVICES[:1], (LayerRun(0, LAYERS, Strategy(1, 1), (ROWS,)),)))
STAGES = plan(
    Stage(DEVICES[:1], (LayerRun(0, 3, Strategy(1, 1, recompute=True), (ROWS,)),)),
    Stage(DEVICES[1:], (LayerRun(3, LAYERS - 3, Strategy(1, 1), (ROWS,)),)),
)
SHARDED = plan(Stage(DEVICES, (LayerRun(0, LAYERS, Strategy(1, 2, sharding=Sharding.ZERO3), (1, 3)),)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder as a user has it: the model's module and description, and the script."""
    shutil.copy(EXAMPLES / "encoder" / "encoder.py", tmp_path)
    shutil.copy(EXAMPLES / "train.py", tmp_path)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    described = describe("encoder:encoder", check_seconds=0, dtypes=[torch.float32])
    (tmp_path / "model.yaml").write_text(documents.dumps(Training(1, custom=described)), encoding="utf-8")
    return tmp_path


def started(folder: Path, *command: str, checkpoints: str) -> subprocess.Popen[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        "--dtype",
        "float32",
        "--checkpoints",
        checkpoints,
        "--iterations",
        str(ITERATIONS),
        "--every",
        str(EVERY),
    ]
    environment = {"NODE": NODE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, **environment, "PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(folder: Path, of: Plan) -> subprocess.Popen[str]:
    for file in TARGETS["torchrun"].files(ExportRequest(of)):
        (folder / file.name).write_text(file.text, encoding="utf-8")
    return started(folder, "bash", "launch.sh", checkpoints="kept")


def printed(process: subprocess.Popen[str]) -> dict[int, list[float]]:
    """Return losses, and those of other rows, by iteration."""
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[:6000]
    lines = re.findall(r"^(\d+) (loss .*)$", output, re.MULTILINE)  # gloo writes some of its own
    return {int(number): [float(value) for value in re.findall(r"\d+\.\d+", rest)] for number, rest in lines}


def kill(folder: Path) -> None:
    """Kill what runs in a folder: torchrun, and its ranks, which have sessions of their own."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                os.kill(int(process.name), signal.SIGKILL)


def test_a_killed_training_resumes_under_another_plan_with_the_same_losses(folder: Path) -> None:
    (folder / "alone.json").write_text(documents.dumps(ALONE), encoding="utf-8")
    expected = printed(started(folder, sys.executable, "train.py", "--plan", "alone.json", checkpoints="alone"))
    first = launched(folder, STAGES)
    while not (folder / "kept" / f"iteration-{EVERY:08}").exists() and first.poll() is None:
        time.sleep(0.02)
    kill(folder)
    first.communicate()
    resumed = printed(launched(folder, SHARDED))
    assert 0 < min(resumed) < ITERATIONS
    assert max(resumed) == ITERATIONS - 1
    for iteration, losses in resumed.items():
        assert losses == pytest.approx(expected[iteration], rel=1e-5)
    assert [number for number, losses in resumed.items() if len(losses) == 2] == [
        number for number in resumed if (number + 1) % EVERY == 0
    ]
