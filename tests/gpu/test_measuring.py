"""Profiles and trials on a real GPU, by the commands that run in pods."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright import documents
from trainwright.cluster import Device
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.worker_api import (
    REPORT_MARKER,
    Gang,
    GangNode,
    ProfilingReport,
    ProfilingTask,
    TrialReport,
    TrialTask,
    WorkerReport,
    WorkerTask,
)

GPT = Gpt(layers=4, hidden_size=512, heads=8, sequence_length=256, vocabulary_size=1024)
MODEL = Model.of(GPT, Dtype.BFLOAT16)


def gang() -> Gang:
    name = torch.cuda.get_device_name(0).replace(" ", "-") if torch.cuda.is_available() else "none"
    return Gang((GangNode("here", (0,), name),), backend="nccl", deadline_seconds=300.0)


def answer(folder: Path, order: WorkerTask) -> WorkerReport:
    path = folder / "order.json"
    path.write_text(documents.dumps(order), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "trainwright_worker", "local", "--order", str(path)], check=False, capture_output=True,
        text=True, timeout=300, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith(REPORT_MARKER))
    return documents.loads(line.partition(" ")[2], WorkerReport)


def test_profiling_reports_every_layer(tmp_path: Path) -> None:
    report = answer(tmp_path, ProfilingTask(gang(), MODEL, 1, (1, 8), iterations=5))
    assert isinstance(report, ProfilingReport)
    assert [(one.kind, one.rows) for one in report.layers] == [
        (kind.name, rows) for kind in MODEL.kinds for rows in (1, 8)
    ]
    for one in report.layers:
        kind = MODEL.kind(one.kind)
        assert one.parameter_bytes == MODEL.dtype.num_bytes * kind.parameters
        assert 0 < one.forward_seconds < 1
        # A GPU's kernels keep what the planner counts, but for the loss, which is computed in float32.
        if one.kind == "block":
            counted = kind.saved_bytes_per_row(MODEL.dtype) * one.rows
            assert one.activation_bytes == pytest.approx(counted, rel=0.05)


def test_trial_of_a_plan_succeeds(tmp_path: Path) -> None:
    layers = len(MODEL.layers)
    stage = Stage((Device("here", 0),), (LayerRun(0, layers, 1, 1, (4,)),))
    plan = Plan(layers, 16, (Pipeline(4, 4, (stage,)),))
    report = answer(tmp_path, TrialTask(gang(), MODEL, plan))
    assert isinstance(report, TrialReport)
    assert report.losses[-1] < report.losses[0]
    assert min(report.iteration_seconds) > 0
    assert report.memory[0].peak_bytes > 4 * 3 * MODEL.parameters
